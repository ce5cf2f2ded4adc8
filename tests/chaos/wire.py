"""A bad network between one actor and its learner, which also writes down what both said.

It passes bytes of TCP connections on, but understands ZMTP 3 (NULL mechanism) well enough to see
messages: so it can drop, double, reorder and delay whole messages, and cut a connection in the
middle of one. The log is an account of what was delivered and acked that neither side keeps.
"""

import asyncio
import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

from capo.launch.processes import free_port
from capo.protocol.errors import ProtocolError
from capo.protocol.frames import Limits, decode
from capo.protocol.messages import (
    Ack,
    Delivery,
    Hello,
    ToActor,
    ToLearner,
    UpdateWeights,
    WeightsReport,
)
from tests.chaos.scripted_actor import Log

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4


class Messages:
    """Cuts one direction of a connection into (bytes on the wire, frames or None)."""

    def __init__(self) -> None:
        self._buffer = b""
        self._greeting = GREETING_BYTES  # still to come; each side waits for parts of the other's
        self._raw = b""
        self._frames: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[tuple[bytes, list[bytes] | None]]:
        self._buffer += data
        if self._greeting and self._buffer:
            passed = self._take(min(self._greeting, len(self._buffer)))
            self._greeting -= len(passed)
            yield passed, None
        while not self._greeting and (header := self._header()) is not None:
            flags, start, size = header
            if len(self._buffer) < start + size:
                return
            raw = self._take(start + size)
            if flags & COMMAND:
                yield raw, None
                continue
            self._raw += raw
            self._frames.append(raw[start:])
            if not flags & MORE:
                yield self._raw, self._frames
                self._raw, self._frames = b"", []

    def _header(self) -> tuple[int, int, int] | None:
        """Flags, length of the header, length of the body."""
        if len(self._buffer) < 2:
            return None
        flags = self._buffer[0]
        if not flags & LONG:
            return flags, 2, self._buffer[1]
        if len(self._buffer) < 9:
            return None
        return flags, 9, int.from_bytes(self._buffer[1:9], "big")

    def _take(self, size: int) -> bytes:
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken


class Rates:
    """How likely it is that a message is dropped, doubled, overtaken by the next, or held back."""

    def __init__(self, drop=0.0, double=0.0, reorder=0.0, delay=0.0, delay_s=0.3) -> None:
        self.drop, self.double, self.reorder = drop, double, reorder
        self.delay, self.delay_s = delay, delay_s


class Wire:
    """Listens at `address`; methods are called from the test's thread.

    `counts` says how often each fault happened.
    """

    def __init__(self, name: str, learner_port: int, log: Path, seed: int) -> None:
        self.port = free_port()
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.rates = Rates()
        self.receiving = False  # weights are on their way to the actor, or not reported on yet
        self.sent = self.acked = 0  # sequences of deliveries
        self.counts = dict.fromkeys(("dropped", "doubled", "reordered", "delayed", "cut"), 0)
        self._name = name
        self._learner_port = learner_port
        self._log = Log(log)
        self._random = random.Random(seed)
        self._open = True
        self._tear = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"wire {name}", daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    def cut(self) -> None:
        """Every connection breaks, and no new one is taken until `heal`."""
        self._open = False
        self.counts["cut"] += 1
        self._loop.call_soon_threadsafe(self._abort)

    def heal(self) -> None:
        self._open = True

    def tear(self) -> None:
        """The next message is passed on in part, then its connection breaks."""
        self._tear = True

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(20)

    def _run(self) -> None:
        async def serve() -> None:
            self._ended = asyncio.Event()
            server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
            self._ready.set()
            await self._ended.wait()
            server.close()
            self._abort()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)

        self._loop.run_until_complete(serve())
        self._loop.close()

    def _stop(self) -> None:
        self._ended.set()

    def _abort(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._open:
            writer.transport.abort()
            return
        try:
            there = await asyncio.open_connection("127.0.0.1", self._learner_port)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, there[1]}
        self._writers |= pair
        both = [
            asyncio.ensure_future(self._pass_on(reader, there[1], ToLearner)),
            asyncio.ensure_future(self._pass_on(there[0], writer, ToActor)),
        ]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the wire is closed; asyncio would log it
            pass
        finally:
            for task in both:
                task.cancel()
            for one in pair:
                one.transport.abort()
            self._writers -= pair

    async def _pass_on(self, reader, writer, kind) -> None:
        messages = Messages()
        held: list[bytes] = []
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                for raw, frames in messages.feed(data):
                    if frames is not None:
                        self._note(frames, kind)
                        for part in await self._spoil(raw, held):
                            writer.write(part)
                        if self._tear and len(raw) > 2:
                            self._tear = False
                            self.counts["cut"] += 1
                            writer.write(raw[: len(raw) // 2])
                            await writer.drain()
                            return
                    else:
                        writer.write(raw)
                await writer.drain()

    async def _spoil(self, raw: bytes, held: list[bytes]) -> list[bytes]:
        rates, chance = self.rates, self._random.random
        if chance() < rates.drop:
            self.counts["dropped"] += 1
            return []
        if chance() < rates.delay:
            self.counts["delayed"] += 1
            await asyncio.sleep(self._random.uniform(0, rates.delay_s))
        if chance() < rates.reorder and not held:
            self.counts["reordered"] += 1
            held.append(raw)
            return []
        parts = [raw]
        if chance() < rates.double:
            self.counts["doubled"] += 1
            parts.append(raw)
        parts += held
        held.clear()
        return parts

    def _note(self, frames: list[bytes], kind) -> None:
        try:
            message = decode(frames, kind, Limits())
        except ProtocolError as error:
            self._log.write("unreadable", error=str(error))
            return
        if isinstance(message, Hello):
            self.receiving = False
            self._log.write("hello", actor_id=message.actor_id)
        elif isinstance(message, UpdateWeights):
            self.receiving = True
        elif isinstance(message, WeightsReport):
            self.receiving = False
            if not message.error:
                self._log.write("weights", version=message.version, checksum=message.checksum)
        elif isinstance(message, Ack):
            self.acked = max(self.acked, message.sequence)
            self._log.write("ack", sequence=message.sequence)
        elif isinstance(message, Delivery):
            self.sent = max(self.sent, message.sequence)
            self._log.write(
                "delivery",
                sequence=message.sequence,
                steps=[
                    (step.episode_id, step.index, digest(step.action.tobytes()))
                    for step in message.steps
                ],
                ends=[(end.episode_id, end.status.value) for end in message.ends],
            )


def digest(action: bytes) -> str:
    return hashlib.blake2b(action, digest_size=8).hexdigest()
