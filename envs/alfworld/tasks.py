"""A game as the payload of a task, so that who plays it needs no files."""

import zlib

import msgspec

from capo.envs.alfworld.games import Game
from capo.protocol.errors import EnvError
from capo.protocol.records import Task

_MAX_BYTES = 4 << 20  # unpacked; real games have about 40 kB


def pack(split: str, game: Game) -> Task:
    return Task(id=f"{split}/{game.id}", payload=zlib.compress(msgspec.msgpack.encode(game), 6))


def unpack(task: Task) -> Game:
    reader = zlib.decompressobj()
    try:
        packed = reader.decompress(task.payload, _MAX_BYTES)
        if not reader.eof:
            raise EnvError(f"the payload of task {task.id} is cut off or larger than 4 MiB")
        return msgspec.msgpack.decode(packed, type=Game)
    except (zlib.error, msgspec.DecodeError) as error:
        raise EnvError(
            f"the payload of task {task.id} is not an ALFWorld game ({error}); do learner and "
            "actor run the same version of capo?"
        ) from error
