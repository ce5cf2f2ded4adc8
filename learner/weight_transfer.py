"""What carries weights to the engines, seen from the sender. Two implementations: gloo and NCCL.

A transport is used from one thread at a time, but `abort` may come from another one while `form` or
`send` is waiting.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from msgspec import Struct

from capo.protocol.records import TensorSpec

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class Payload(Struct, frozen=True):
    """What a broadcast says about itself. `checksum` is "" where the bytes are not hashed."""

    tensors: tuple[TensorSpec, ...]
    num_bytes: int
    checksum: str


class WeightTransport(Protocol):
    @property
    def name(self) -> str:
        """ "gloo" or "nccl", as in GroupForm."""
        ...

    def stage(self, tensors: NamedTensors) -> Payload:
        """Take the weights once; `send` may then repeat them to any number of groups."""
        ...

    def endpoint(self) -> tuple[str, int]:
        """Host and port at which the next group will be formed."""
        ...

    def form(self, epoch: int, world_size: int, timeout_s: float) -> None:
        """Stand as rank 0 of a new group in place of the old one; WeightSyncError if it fails."""
        ...

    def arrived(self, epoch: int, rank: int) -> bool:
        """Whether that rank reached the meeting point of `epoch`; True where it cannot be told."""
        ...

    def send(self, bucket_bytes: int, timeout_s: float) -> None:
        """Broadcast what was staged to the group; WeightSyncError when a member breaks off."""
        ...

    def abort(self) -> None:
        """Give the group up and let every call that waits in it end."""
        ...

    def close(self) -> None: ...


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
