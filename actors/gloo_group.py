"""The receiving end of a gloo broadcast: join the group of an epoch, take the stream of bytes.

Knows neither vLLM nor the model. Blocking; torch gives up the interpreter lock while it waits, so
these run well in a thread beside the engine. The sending end is learner/weight_transfer_gloo.py.
"""

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from capo.actors.engine import UnreachableStoreError
from capo.protocol.errors import WeightSyncError
from capo.protocol.sayings import first_line
from capo.protocol.weight_layout import buckets, checksum

c10d: Any = torch.distributed  # its type stubs leave out what is needed here


def join(host: str, port: int, epoch: int, rank: int, world_size: int, timeout_s: float) -> Any:
    """Blocks until all `world_size` members of `epoch` are connected to each other.

    Needs no default process group, so any number of groups may follow each other.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        address = _own_address(host, port, timeout_s)
        store = c10d.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        prefixed = c10d.PrefixStore(f"epoch{epoch}", store)
        prefixed.set(f"arrived{rank}", address)
    except (OSError, RuntimeError) as error:
        raise UnreachableStoreError(
            f"the weight store of the learner at {host}:{port} cannot be reached from here "
            f"({first_line(error)}); open that port, or set network.weights_host to an address "
            "that this machine can reach"
        ) from error
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    options._threads = 1
    try:
        return c10d.ProcessGroupGloo(prefixed, rank, world_size, options)
    except RuntimeError as error:
        raise WeightSyncError(
            f"weight group {epoch} did not come together within {timeout_s:g} s "
            f"({first_line(error)})"
        ) from error


def receive(
    group: Any, total_bytes: int, bucket_bytes: int, timeout_s: float
) -> tuple[torch.Tensor, str]:
    """The stream as one uint8 tensor [total_bytes], and the checksum of what arrived.

    A piece is summed up while the next one is on its way. WeightSyncError when a member breaks
    off; nothing but the new buffer was touched then.
    """
    timeout = timedelta(seconds=timeout_s)
    options = c10d.BroadcastOptions()
    options.rootRank = 0
    options.timeout = timeout
    stream = torch.empty(total_bytes, dtype=torch.uint8)
    total = ""
    arrived = stream[:0]
    try:
        for start, end in buckets(total_bytes, bucket_bytes):
            piece = stream[start:end]
            work = group.broadcast([piece], options)
            total = checksum(arrived.numpy().data, total)
            work.wait(timeout)
            arrived = piece
    except RuntimeError as error:
        raise WeightSyncError(f"the transfer broke off ({first_line(error)})") from error
    return stream, checksum(arrived.numpy().data, total)


def _own_address(host: str, port: int, timeout_s: float) -> str:
    """The address of the interface of this machine that leads to the learner."""
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        return str(connection.getsockname()[0])
