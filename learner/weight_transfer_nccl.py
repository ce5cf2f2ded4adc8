"""The sending end of vLLM's own NCCL weight transfer: rank 0 of a group with the engines' workers.

vLLM is imported when the first group is formed, so a learner that never broadcasts over NCCL does
not need it. Tensors are sent from the device as they are, without a hash: the probe is the check.
Written against vLLM 0.32's interface (nccl_common.trainer_init and packed_tensor); it has not been
run, because it needs CUDA devices on both sides.
"""

import socket
from collections.abc import Iterator
from typing import Any

import torch

from capo.learner.weight_transfer import NamedTensors, Payload, spec_of
from capo.protocol.errors import WeightSyncError


class NcclTransport:
    """`host` is an address of this machine that every actor can reach; every group has a new port.

    NCCL cannot be interrupted: a group that waits for a member that never comes ends with the
    store's own time limit, in its own thread, while the next group is formed elsewhere.
    """

    name = "nccl"

    def __init__(self, host: str, device: torch.device) -> None:
        if device.type != "cuda":
            raise WeightSyncError(
                f"weight_sync.transport is nccl, but the learner's device is {device.type}; "
                "set it to gloo"
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        self._host = host
        self._device = torch.device("cuda", index)
        self._port = 0
        self._group: Any = None
        self._tensors: list[tuple[str, torch.Tensor]] = []

    def stage(self, tensors: NamedTensors) -> Payload:
        self._tensors = [
            (name, tensor.detach().to(self._device).contiguous()) for name, tensor in tensors
        ]
        return Payload(
            tuple(spec_of(name, tensor) for name, tensor in self._tensors),
            sum(tensor.numel() * tensor.element_size() for _, tensor in self._tensors),
            "",
        )

    def endpoint(self) -> tuple[str, int]:
        with socket.socket() as probe:
            probe.bind((self._host, 0))
            self._port = int(probe.getsockname()[1])
        return self._host, self._port

    def form(self, epoch: int, world_size: int, timeout_s: float) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self.abort()
        torch.cuda.set_device(self._device)
        rendezvous = {
            "master_address": self._host,
            "master_port": self._port,
            "world_size": world_size,
        }
        try:
            self._group = trainer_init(rendezvous)
        except RuntimeError as error:
            raise WeightSyncError(
                f"weight group {epoch} did not come together ({error})"
            ) from error

    def arrived(self, epoch: int, rank: int) -> bool:
        return True

    def send(self, bucket_bytes: int, timeout_s: float) -> None:
        """`bucket_bytes` does not apply: both sides use vLLM's own packing."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        if self._group is None:
            raise WeightSyncError("there is no weight group to send to")
        torch.cuda.set_device(self._device)
        tensors: Iterator[tuple[str, torch.Tensor]] = iter(self._tensors)
        try:
            packed_nccl_broadcast_producer(
                iterator=tensors, group=self._group, src=0, post_iter_func=lambda item: item[1]
            )
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise WeightSyncError(f"the transfer broke off ({error})") from error

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.destroy()

    def close(self) -> None:
        self.abort()
        self._tensors = []
