"""Ranks as threads of one process, and engines whose model is a table: what an optimizer step sums
over ranks, without processes and in float64."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

Found = TypeVar("Found")


class Meeting:
    """Where `size` threads bring their part of a sum; all leave with the whole."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60.0)
        self.parts: dict[int, Tensor] = {}

    def sum(self, rank: int, part: Tensor) -> Tensor:
        self.parts[rank] = part.clone()
        self.barrier.wait()
        part.copy_(torch.stack([self.parts[one] for one in sorted(self.parts)]).sum(dim=0))
        self.barrier.wait()
        return part


class ThreadRanks:
    """A `Ranks` of threads."""

    def __init__(self, rank: int, world_size: int, meeting: Meeting) -> None:
        self.rank, self.world_size, self.meeting = rank, world_size, meeting
        self.device = torch.device("cpu")

    def sum(self, tensor: Tensor) -> Tensor:
        return self.meeting.sum(self.rank, tensor)


class TableEngine:
    """A `TrainEngine` whose model looks its outputs up: one parameter per token or reading.

    Like DeepSpeed it averages gradients over ranks, and like `TrainEngine` it undoes that.
    """

    def __init__(self, table: Tensor, ranks: Any) -> None:
        self.table = table.clone().requires_grad_()
        self.ranks = ranks
        self.gradient = torch.zeros_like(table)
        self.complete = False

    def model(self, microbatch: Any, temperature: float) -> tuple[Tensor, None]:
        return self.table[microbatch.tokens], None

    def forward(self, microbatch: Any, argument: Any) -> Any:
        """Log-probs for a temperature, values for positions: here the numbers of the readings."""
        if isinstance(argument, Tensor):
            return self.table[argument]
        return self.model(microbatch, argument)

    def backward(self, loss_sum: Tensor, divisor: float, *, last: bool) -> None:
        assert not self.complete
        (loss_sum * (self.ranks.world_size / divisor)).backward()
        self.complete = last

    def step(self, learning_rate: float) -> float:
        assert self.complete
        assert self.table.grad is not None
        self.gradient = self.ranks.sum(self.table.grad.clone()) / self.ranks.world_size
        return float(self.gradient.norm())


def on_ranks(world_size: int, run: Callable[[ThreadRanks], Found]) -> list[Found]:
    """What `run` returns on each of the ranks."""
    meeting = Meeting(world_size)

    def one(rank: int) -> Found:
        try:
            return run(ThreadRanks(rank, world_size, meeting))
        except BaseException:
            meeting.barrier.abort()  # nobody waits for a rank that is gone
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return [done.result() for done in [pool.submit(one, rank) for rank in range(world_size)]]
