"""What rank 0 of a learner tells the other ranks to do, since only it knows the run.

An order is broadcast over a gloo group of its own, as the frames of the wire in one row of bytes:
nothing is pickled. Other ranks wait for orders without a limit, as rank 0 waits for episodes; a
rank 0 that has died ends the wait, because its connection breaks.
"""

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor

from capo.configs.schema import RunConfig
from capo.learner.episodes import Episode
from capo.learner.ranks import Ranks
from capo.protocol.errors import RankLostError
from capo.protocol.frames import FrameDecoder, Limits, encode
from capo.protocol.records import IntArray

_FOR_EVER = timedelta(days=3650)
_NO_LIMIT = 1 << 62
_LIMITS = Limits(max_frames=_NO_LIMIT, max_header_bytes=_NO_LIMIT, max_message_bytes=_NO_LIMIT)


class Open(Struct, frozen=True, tag=True):
    """Make a trainer, in place of the one there may be."""

    config: RunConfig
    policy_dir: str


class Update(Struct, frozen=True, tag=True):
    version: int
    episodes: tuple[Episode, ...]


class GatherWeights(Struct, frozen=True, tag=True):
    pass


class Score(Struct, frozen=True, tag=True):
    """Take part in `Trainer.logprobs`."""

    tokens: IntArray


class Save(Struct, frozen=True, tag=True):
    folder: str


class Load(Struct, frozen=True, tag=True):
    folder: str


class End(Struct, frozen=True, tag=True):
    """Rank 0 is done."""


Order = Open | Update | GatherWeights | Score | Save | Load | End


class Orders:
    """The channel of orders; all ranks open one at the same time."""

    def __init__(self, ranks: Ranks) -> None:
        self._rank = ranks.rank
        self._group = dist.new_group(backend="gloo", timeout=_FOR_EVER)
        self._decoder: FrameDecoder[Order] = FrameDecoder(Order, _LIMITS)

    def give(self, order: Order) -> None:
        """On rank 0. Raises RankLostError where another rank is gone."""
        frames = encode(order)
        self._broadcast(torch.tensor([len(frames)]))
        self._broadcast(torch.tensor([len(frame) for frame in frames]))
        self._broadcast(torch.frombuffer(bytearray(b"".join(frames)), dtype=torch.uint8))

    def take(self) -> Order:
        """On any other rank: the next order. Raises RankLostError where rank 0 is gone."""
        count = int(self._broadcast(torch.zeros(1, dtype=torch.int64)))
        sizes = self._broadcast(torch.zeros(count, dtype=torch.int64)).tolist()
        row = self._broadcast(torch.zeros(sum(sizes), dtype=torch.uint8))
        return self._decoder.decode(_cut(row, sizes))

    def _broadcast(self, tensor: Tensor) -> Tensor:
        try:
            dist.broadcast(tensor, src=0, group=self._group)
        except RuntimeError as error:  # all that torch says when a peer is gone
            gone = "another rank" if self._rank == 0 else "rank 0"
            raise RankLostError(f"{gone} of this learner is gone ({error}).") from error
        return tensor


def _cut(row: Tensor, sizes: Sequence[int]) -> list[memoryview]:
    whole = row.numpy().data
    ends = np.cumsum(sizes).tolist()
    return [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]
