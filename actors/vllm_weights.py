"""Inside vLLM's worker processes: how new weights get into the model, and who ends with whom.

vLLM imports this module there as `worker_extension_cls`; importing it registers the transfer
backend "capo". The backend speaks two transports. "gloo" is our own, for CPUs (and CUDA machines
without NCCL between actor and learner): a thread receives the whole stream and checks its checksum
while generation goes on; the model is touched only by `finish_weight_update`, under the pause. So a
transfer that breaks off leaves the engine exactly as it was. "nccl" is vLLM's own engine, into
which everything is handed; it writes into the model as tensors come, so after a broken transfer the
engine must stay paused until the next one. The NCCL path has not been run: it needs CUDA devices.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from capo.actors import gloo_group, vllm_entropy
from capo.actors.child import end_with_parent
from capo.actors.engine import UnreachableStoreError
from capo.actors.vllm_core import JobState
from capo.actors.vllm_start import BACKEND
from capo.protocol.errors import WeightSyncError
from capo.protocol.records import TensorSpec
from capo.protocol.weight_layout import Layout, layout

T = TypeVar("T")


@dataclass
class GroupInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vllm is not typed
    """What a worker must know to join. `rank` is the first of this engine's workers."""

    transport: str
    host: str
    port: int
    epoch: int
    rank: int
    world_size: int
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vllm is not typed
    """`tensors` are (name, dtype name, shape), in the order of the stream."""

    tensors: list[Any]
    bucket_bytes: int
    checksum: str
    timeout_s: float

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in self.tensors]


@dataclass
class Staged:
    """Weights that arrived and were checked, not yet in the model."""

    stream: torch.Tensor  # uint8 [layout.total_bytes]
    layout: Layout
    specs: list[TensorSpec]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec, offset, size in zip(
            self.specs, self.layout.offsets, self.layout.sizes, strict=True
        ):
            flat = self.stream[offset : offset + size].view(getattr(torch, spec.dtype))
            yield spec.name, flat.view(spec.shape)


class CapoWeightTransfer(WeightTransferEngine[GroupInfo, UpdateInfo]):  # type: ignore[misc]  # vllm is not typed
    """One per worker. vLLM calls the inherited interface, `WorkerExtension` the rest."""

    init_info_cls = GroupInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: Any = None
        self._nccl: WeightTransferEngine[Any, Any] | None = None
        self._staged: Staged | None = None
        self._job: Future[Any] | None = None

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """gloo: returns at once, `state` tells when the group stands. nccl: blocks."""
        self.shutdown()
        if init_info.transport == "nccl":
            self._nccl = _join_nccl(self, init_info)
            return
        self._job = _in_thread("join weights", lambda: self._join(init_info))

    def start_weight_update(self) -> None:
        if self._nccl is not None:
            self._nccl.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """gloo: nothing is left to do but to see that the weights are staged. nccl: receives."""
        if self._nccl is not None:
            typed = self.parse_update_info(update_info)
            specs = typed.specs()
            self._nccl.update_weights(
                {
                    "names": [spec.name for spec in specs],
                    "dtype_names": [spec.dtype for spec in specs],
                    "shapes": [list(spec.shape) for spec in specs],
                }
            )
        elif self._staged is None:
            raise WeightSyncError("no weights are staged for this update")

    def receive_weights(self, update_info: UpdateInfo) -> None:
        raise AssertionError("update_weights is overridden and never calls this")

    def finish_weight_update(self) -> None:
        if self._nccl is not None:
            self._nccl.finish_weight_update()
            return
        assert self._staged is not None
        staged, self._staged = self._staged, None
        initialize_layerwise_reload(self.model)
        self.model.load_weights(staged.tensors())
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_head(self.model)

    def shutdown(self) -> None:
        self._staged = None
        self._job = None
        if self._group is not None:
            self._group.abort()
            self._group = None
        if self._nccl is not None:
            self._nccl.shutdown()
            self._nccl = None

    def stage(self, update_info: UpdateInfo) -> None:
        """Start to receive. `state` tells when all of it has arrived and was checked."""
        if self._nccl is not None:
            return
        group = self._group
        if group is None:
            raise WeightSyncError("this engine is in no weight group")
        self._job = _in_thread("receive weights", lambda: self._receive(group, update_info))

    def state(self) -> JobState:
        """Of the job that was started last.

        What a thread brought is adopted here, on the worker's own thread: the outcome of a job that
        was replaced by a newer one is dropped.
        """
        if self._job is None:
            return {"busy": False, "error": "", "reached": True}
        if not self._job.done():
            return {"busy": True, "error": "", "reached": True}
        error = self._job.exception()
        if error is None:
            outcome = self._job.result()
            if isinstance(outcome, Staged):
                self._staged = outcome
            else:
                self._group = outcome
            self._job = None
        return {
            "busy": False,
            "error": "" if error is None else str(error) or type(error).__name__,
            "reached": not isinstance(error, UnreachableStoreError),
        }

    def _join(self, info: GroupInfo) -> Any:
        rank = info.rank + self._own_rank()
        return gloo_group.join(
            info.host, info.port, info.epoch, rank, info.world_size, info.timeout_s
        )

    def _receive(self, group: Any, info: UpdateInfo) -> Staged:
        specs = info.specs()
        plan = layout(specs)
        stream, checksum = gloo_group.receive(
            group, plan.total_bytes, info.bucket_bytes, info.timeout_s
        )
        if info.checksum and checksum != info.checksum:
            raise WeightSyncError(
                f"the bytes that arrived have the checksum {checksum}, "
                f"the learner's have {info.checksum}"
            )
        return Staged(stream, plan, specs)

    def _own_rank(self) -> int:
        parallel = self.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)


class WorkerExtension:
    """Methods that `AsyncLLM.collective_rpc` can call by name on every worker."""

    weight_transfer_engine: Any
    model_runner: Any

    def capo_record_entropies(self) -> None:
        vllm_entropy.install(self.model_runner)

    def capo_stage(self, update_info: dict[str, Any]) -> None:
        transfer = self.weight_transfer_engine
        transfer.stage(transfer.parse_update_info(update_info))

    def capo_state(self) -> JobState:
        state: JobState = self.weight_transfer_engine.state()
        return state


def _join_nccl(owner: CapoWeightTransfer, info: GroupInfo) -> WeightTransferEngine[Any, Any]:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    engine = NCCLWeightTransferEngine(owner.config, owner.vllm_config, owner.device, owner.model)
    engine.init_transfer_engine(
        engine.parse_init_info(
            {
                "master_address": info.host,
                "master_port": info.port,
                "rank_offset": info.rank,
                "world_size": info.world_size,
                "packed": True,
            }
        )
    )
    return engine


def _repack_tied_head(model: torch.nn.Module) -> None:
    """A tied output head keeps a prepacked copy of the old embedding on CPUs: repack it.

    Reloading puts weights into the embedding alone, because the checkpoint has no entry for the
    head; without this the logits are silently those of the old head.
    """
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding:
        return
    head.weight.data = embedding.weight.data
    head.quant_method.process_weights_after_loading(head)


def _in_thread(name: str, work: Callable[[], T]) -> "Future[T]":
    future: Future[T] = Future()

    def run() -> None:
        try:
            outcome = work()
        except BaseException as error:  # told when `state` is asked for
            future.set_exception(error)
        else:
            future.set_result(outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


end_with_parent()
WeightTransferEngineFactory.register_engine(BACKEND, CapoWeightTransfer)
