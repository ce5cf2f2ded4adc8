"""Broken messages of every type, drawn by a seed: valid ones changed a little or a lot."""

import random
import struct

import msgspec

from capo.protocol.frames import encode
from capo.protocol.messages import Delivery, Hello, ToLearner
from tests.protocol.examples import EXAMPLES

KINDS = ToLearner.__args__
DRAWN = (*KINDS, Delivery, Delivery, Delivery, Hello)  # those that say most more often
HOSTILE_VALUES = (
    None, True, -1, 0, 1, 255, 2**31, 2**53 + 1, 2**63 - 1, 2**64 - 1, -(2**63),
    float("nan"), float("inf"), -0.0, 1e308, "", "x" * 300, "\x00", "é" * 200, b"", b"\xff" * 9,
    [], [0], [[]], {}, {"": 0}, [None] * 50, {"type": "Hello"}, ["terminated"], "truncated",
)  # fmt: skip
HUGE = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xc9\xff\xff\xff\xff\x01")  # fmt: skip


class Mutator:
    """Breaks valid messages, a little or a lot; the same inputs for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.valid = {kind: [bytes(frame) for frame in encode(EXAMPLES[kind])] for kind in KINDS}
        self.valid[Delivery] = [
            bytes(frame)
            for frame in encode(msgspec.structs.replace(EXAMPLES[Delivery], sequence=1))
        ]
        self.changes = (
            self.flip_bits, self.truncate, self.append, self.swap, self.drop, self.double,
            self.replace, self.insert_huge, self.nest, self.splice, self.touch_values,
            self.touch_values, self.touch_values, self.touch_values, self.touch_array,
        )  # fmt: skip

    def input(self, kind: type) -> list[bytes]:
        frames = list(self.valid[kind])
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            self.random.choice(self.changes)(frames)
        return frames

    def place(self, frames: list[bytes]) -> int:
        return self.random.choice((0, self.random.randrange(len(frames))))

    def flip_bits(self, frames: list[bytes]) -> None:
        place = self.place(frames)
        changed = bytearray(frames[place])
        for _ in range(self.random.choice((1, 1, 2, 8))):
            if changed:
                changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        frames[place] = bytes(changed)

    def truncate(self, frames: list[bytes]) -> None:
        place = self.place(frames)
        frames[place] = frames[place][: self.random.randint(0, len(frames[place]))]

    def append(self, frames: list[bytes]) -> None:
        frames[self.place(frames)] += self.random.randbytes(self.random.choice((1, 3, 4, 64)))

    def swap(self, frames: list[bytes]) -> None:
        one, two = self.place(frames), self.place(frames)
        frames[one], frames[two] = frames[two], frames[one]

    def drop(self, frames: list[bytes]) -> None:
        if len(frames) > 1:
            del frames[self.place(frames)]

    def double(self, frames: list[bytes]) -> None:
        place = self.place(frames)
        frames.insert(place, frames[place])

    def replace(self, frames: list[bytes]) -> None:
        frames[self.place(frames)] = self.random.randbytes(self.random.randrange(80))

    def insert_huge(self, frames: list[bytes]) -> None:
        cut = self.random.randint(0, len(frames[0]))
        rest = cut + self.random.choice((0, 1, 1, 2))
        frames[0] = frames[0][:cut] + self.random.choice(HUGE) + frames[0][rest:]

    def nest(self, frames: list[bytes]) -> None:
        depth = self.random.choice((2, 100, 900, 5000, 40_000))
        inner = self.random.choice((b"\x91", b"\x81\xa1a", b"\x92\xc0")) * depth
        cut = self.random.choice((0, 1, len(frames[0]) // 2, len(frames[0])))
        frames[0] = frames[0][:cut] + inner + frames[0][cut:]

    def splice(self, frames: list[bytes]) -> None:
        other = self.valid[self.random.choice(KINDS)]
        if self.random.random() < 0.5:
            frames[0] = other[0]
        else:
            frames[1:] = other[1:]

    def touch_values(self, frames: list[bytes]) -> None:
        """Another value, key or tag in a header that stays well-formed."""
        try:
            header = msgspec.msgpack.decode(frames[0])
        except (msgspec.DecodeError, RecursionError, ValueError):
            return
        nodes = [node for node in containers(header) if node]
        if not nodes:
            return
        node = self.random.choice(nodes)
        key = self.random.choice(list(node) if isinstance(node, dict) else range(len(node)))
        change = self.random.random()
        if isinstance(node, dict) and change < 0.1:
            del node[key]
        elif isinstance(node, dict) and change < 0.2:
            node["more"] = self.random.choice(HOSTILE_VALUES)
        elif isinstance(node, list) and change < 0.2:
            node.extend([node[key]] * self.random.choice((1, 2, 300)))
        elif type(node[key]) is int and change < 0.5:
            node[key] += self.random.choice((-2, -1, 1, 2))
        elif key == "type":
            node[key] = self.random.choice([*(kind.__name__ for kind in KINDS), "Welcome", "X", 1])
        else:
            node[key] = self.random.choice(HOSTILE_VALUES)
        try:
            frames[0] = msgspec.msgpack.encode(header)
        except (OverflowError, ValueError, RecursionError):
            return

    def touch_array(self, frames: list[bytes]) -> None:
        """Numbers of the right size that make no sense."""
        if len(frames) > 1:
            place = self.random.randrange(1, len(frames))
            number = self.random.choice(
                (struct.pack("<i", -1), struct.pack("<f", float("nan")), b"\xff\xff\xff\x7f")
            )
            frames[place] = number * self.random.choice((1, len(frames[place]) // 4))


def containers(value: object) -> list[dict | list]:
    found, waiting = [], [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            found.append(one)
            waiting += one.values() if isinstance(one, dict) else one
    return found
