"""The learner's data-parallel ranks: joining them, and the sums they share.

One process is a group of one. Several find each other by the environment variables of torch's
launchers (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). Ranks that share a machine may
meet in a file instead, which RENDEZVOUS names, and then need no port.
"""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from capo.protocol.errors import ConfigError, RankLostError
from capo.protocol.sayings import first_line

JOIN_TIMEOUT = timedelta(minutes=10)
RENDEZVOUS = "CAPO_RANKS_FILE"
LOOPBACK_ONLY = "GLOO_SOCKET_IFNAME"


class Ranks(Struct, frozen=True):
    """This process's place among the ranks, and the device it computes on."""

    rank: int
    world_size: int
    device: torch.device

    def sum(self, tensor: Tensor) -> Tensor:
        """The element-wise sum over ranks, on every rank; `tensor` itself is overwritten."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, number: int) -> int:
        """The largest number that a rank came with, on every rank. All have to come."""
        if self.world_size == 1:
            return number
        numbers = torch.tensor([number])
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return int(numbers)


def join() -> Ranks:
    """Joins the process group, or forms one of a single process; again: the group there is.

    Raises ConfigError where the environment has a rank but does not say where the ranks meet, and
    RankLostError where they do not.
    """
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        several = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
        try:
            _meet(backend) if several else _form_alone(backend)
        except RuntimeError as error:  # as where no network interface has the name that is set
            raise RankLostError(
                f"the ranks of this learner did not come together: {first_line(error)}"
            ) from error
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


def _meet(backend: str) -> None:
    file = os.environ.get(RENDEZVOUS)
    if not file and not {"MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
        raise ConfigError(
            "RANK and WORLD_SIZE are set in the environment, but not MASTER_ADDR and MASTER_PORT, "
            "as a launcher such as torchrun does: unset those, or set these."
        )
    dist.init_process_group(
        backend,
        init_method=f"file://{file}" if file else "env://",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=JOIN_TIMEOUT,
    )


def leave() -> None:
    """After the last exchange of several ranks. Left to the end of the process, threads of the
    groups are sometimes still at work when C++ destroys them, which aborts it (SIGABRT)."""
    if dist.is_initialized():
        dist.destroy_process_group()


def loopback_interface() -> str | None:
    """The name of this machine's loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


def _form_alone(backend: str) -> None:
    """A group of one needs neither an address nor a resolvable host name: loopback is enough."""
    loopback = loopback_interface()
    borrowed = loopback is not None and LOOPBACK_ONLY not in os.environ
    if borrowed and loopback is not None:
        os.environ[LOOPBACK_ONLY] = loopback
    try:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    finally:
        if borrowed:  # groups that are formed later may span machines
            del os.environ[LOOPBACK_ONLY]
