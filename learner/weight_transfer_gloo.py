"""The sending end of a gloo broadcast, without vLLM. The learner hosts the store where groups meet.

Weights are copied once into one flat stream in main memory, hashed, and sent in pieces. Groups need
no default process group, so one may follow the other. The receiving end: actors/gloo_group.py.
"""

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from capo.learner.weight_transfer import NamedTensors, Payload, spec_of
from capo.protocol.errors import WeightSyncError
from capo.protocol.sayings import first_line
from capo.protocol.weight_layout import buckets, checksum, layout

c10d: Any = torch.distributed  # its type stubs leave out what is needed here


class GlooTransport:
    """`host` is an address of this machine that every actor can reach; port 0 takes a free one."""

    name = "gloo"

    def __init__(self, host: str, port: int = 0, timeout_s: float = 20.0) -> None:
        self._host = host
        try:
            # Left to itself the store listens on every address of the machine.
            listener = socket.create_server((host, port))
            port = int(listener.getsockname()[1])
            self._store = c10d.TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=listener.detach(),
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise WeightSyncError(
                f"cannot open the weight store on {host}:{port} ({first_line(error)}); "
                "set network.weights_host to an address of this machine"
            ) from error
        self._group: Any = None
        self._epoch = -1
        self._stream = torch.empty(0, dtype=torch.uint8)

    def stage(self, tensors: NamedTensors) -> Payload:
        named = [(name, tensor.detach()) for name, tensor in tensors]
        specs = tuple(spec_of(name, tensor) for name, tensor in named)
        plan = layout(specs)
        if len(self._stream) != plan.total_bytes:
            self._stream = torch.zeros(plan.total_bytes, dtype=torch.uint8)
        stream = self._stream  # the gaps stay zero: the layout of a model does not change
        for (_, tensor), offset, size in zip(named, plan.offsets, plan.sizes, strict=True):
            flat = stream[offset : offset + size].view(tensor.dtype)
            flat.view(tensor.shape).copy_(tensor)
        return Payload(specs, plan.total_bytes, checksum(stream.numpy().data))

    def endpoint(self) -> tuple[str, int]:
        return self._host, int(self._store.port)

    def form(self, epoch: int, world_size: int, timeout_s: float) -> None:
        self.abort()
        self._epoch = epoch
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        try:
            # A connection of its own: one that waits in vain must not hold up the next group.
            connection = c10d.TCPStore(
                *self.endpoint(),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
            store = c10d.PrefixStore(f"epoch{epoch}", connection)
            group = c10d.ProcessGroupGloo(store, 0, world_size, options)
        except RuntimeError as error:
            raise WeightSyncError(
                f"weight group {epoch} did not come together within {timeout_s:g} s "
                f"({first_line(error)})"
            ) from error
        if epoch == self._epoch:  # else a later call has already given this one up
            self._group = group

    def arrived(self, epoch: int, rank: int) -> bool:
        return bool(self._store.check([f"epoch{epoch}/arrived{rank}"]))

    def send(self, bucket_bytes: int, timeout_s: float) -> None:
        group = self._group
        if group is None:
            raise WeightSyncError("there is no weight group to send to")
        timeout = timedelta(seconds=timeout_s)
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timeout
        try:
            for start, end in buckets(len(self._stream), bucket_bytes):
                group.broadcast([self._stream[start:end]], options).wait(timeout)
        except RuntimeError as error:
            raise WeightSyncError(f"the transfer broke off ({first_line(error)})") from error

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def close(self) -> None:
        self.abort()
        self._stream = torch.empty(0, dtype=torch.uint8)
