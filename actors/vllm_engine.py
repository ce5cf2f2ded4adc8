"""vLLM's AsyncLLM as the `Engine` of an actor: samples actions, takes new weights, checks them.

It has dummy weights until the first broadcast fills it. What samples while weights come is paused,
not ended, and goes on with the new ones. Only the modules named `vllm_...` import vllm.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from capo.actors.engine import Sample
from capo.actors.vllm_core import VllmCore
from capo.actors.vllm_probe import probe_complaint, prompt_logprobs
from capo.actors.vllm_sample import ENTROPY_COLUMNS, read_output, sampling_parameters, to_sample
from capo.protocol.errors import EngineError, WeightSyncError
from capo.protocol.messages import GroupForm, UpdateWeights, WeightsReport
from capo.protocol.records import IntArray


class VllmEngine:
    """Owns one AsyncLLM. `broken` once set stays set: the actor has to end."""

    def __init__(self, llm: Any, workers: int, limit_s: float) -> None:
        """`workers`: ranks in a weight group. `limit_s`: for every order, then the engine hangs."""
        self.version = -1
        self.workers = workers
        self._core = VllmCore(llm, limit_s)
        self._verified = asyncio.Event()  # unset while weights are in but not yet checked
        self._verified.set()
        self._updating = asyncio.Lock()
        self._group: GroupForm | None = None
        self._columns = 1  # numbers per sampled token

    @property
    def broken(self) -> str:
        return self._core.broken

    async def generate(
        self,
        prompt: IntArray,
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        if self.version < 0 and not self.broken:
            raise EngineError("the engine has no weights yet; it gets them from the next broadcast")
        columns = self._columns
        parameters = sampling_parameters(max_tokens, temperature, seed, stop_token_ids, columns)
        completion = (await self._core.final(prompt, parameters)).outputs[0]
        output = read_output(completion, columns)
        # A sample that ended between new weights and their check counts only if the check passes.
        await self._verified.wait()
        if self.broken:
            raise EngineError(self.broken)
        return to_sample(output, stop_token_ids)

    async def record_entropies(self) -> None:
        """From now on samples carry the entropy of the distribution that each token came from."""
        try:
            await self._core.call(
                "record entropies", self._core.llm.collective_rpc("capo_record_entropies")
            )
        except WeightSyncError as error:
            raise EngineError(f"this engine cannot record entropies: {error}") from error
        self._columns = ENTROPY_COLUMNS

    async def overdue(self, begun_at: float) -> None:
        await self._core.overdue(begun_at)

    async def form_group(self, form: GroupForm) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        async with self._updating:
            self._group = None
            request = WeightTransferInitRequest(
                init_info={
                    "transport": form.transport,
                    "host": form.host,
                    "port": form.port,
                    "epoch": form.epoch,
                    "rank": form.rank,
                    "world_size": form.world_size,
                    "timeout_s": form.timeout_s,
                }
            )
            joining = self._core.llm.init_weight_transfer_engine(request)
            await self._core.call("join a weight group", joining, form.timeout_s)
            await self._core.finished(f"weight group {form.epoch}", form.timeout_s)
            self._group = form

    async def update_weights(self, update: UpdateWeights) -> WeightsReport:
        async with self._updating:
            if self.broken:
                return _failed(update, self.broken)
            if self._group is None or self._group.epoch != update.epoch:
                return _failed(update, f"not in weight group {update.epoch}", broke_off=True)
            try:
                return await self._update(update, self._group)
            except WeightSyncError as error:
                return _failed(update, str(error), broke_off=True)
            except EngineError as error:
                self._core.give_up(str(error))
                return _failed(update, self.broken)
            finally:
                await self._core.end_requests_if_broken()

    async def close(self) -> None:
        await self._core.close()

    async def _update(self, update: UpdateWeights, group: GroupForm) -> WeightsReport:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        core = self._core
        info = {
            "tensors": [[spec.name, spec.dtype, list(spec.shape)] for spec in update.tensors],
            "bucket_bytes": update.bucket_bytes,
            "checksum": update.checksum,
            "timeout_s": update.timeout_s,
        }
        staging = core.llm.collective_rpc("capo_stage", args=(info,))
        await core.call("make room for weights", staging)
        await core.finished(f"weights of version {update.version}", update.timeout_s)

        self._verified.clear()
        try:
            paused_at = time.monotonic()
            await core.call("pause", core.llm.pause_generation(mode="keep", clear_cache=True))
            await core.call("begin with new weights", core.llm.start_weight_update())
            # Over NCCL the weights come now: when that breaks off, the engine stays paused.
            taking = core.llm.update_weights(WeightTransferUpdateRequest(update_info=info))
            await core.call("take the weights", taking, update.timeout_s)
            finishing = core.llm.finish_weight_update(weight_version=str(update.version))
            try:
                await core.call("finish the weights", finishing)
            except WeightSyncError as error:
                raise EngineError(f"the model does not take the weights: {error}") from error
            await core.call("resume", core.llm.resume_generation())
            pause_s = time.monotonic() - paused_at
            asking = prompt_logprobs(core, update.probe)
            logprobs = await core.within_limit("answer the probe", asking)
            complaint = probe_complaint(logprobs, update)
            if complaint:
                core.give_up(complaint)
            else:
                self.version = update.version
        finally:
            self._verified.set()
        return WeightsReport(
            epoch=update.epoch,
            version=update.version,
            error=complaint,
            checksum=update.checksum if group.transport == "gloo" else "",
            probe_logprobs=logprobs,
            pause_s=pause_s,
        )


def _failed(update: UpdateWeights, error: str, broke_off: bool = False) -> WeightsReport:
    return WeightsReport(
        epoch=update.epoch, version=update.version, error=error, broke_off=broke_off
    )
