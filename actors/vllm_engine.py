"""vLLM's AsyncLLM as the `Engine` of an actor: token ids in, token ids and log-probs out.

The engine starts with dummy weights from the model's config alone; the first broadcast fills it.
Its core runs in a child process that ends with this one. Only the modules named `vllm_...`
import vllm, and only here when an engine is started (10-20 s).
"""

import asyncio
import gc
import os
import time
import warnings
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from capo.actors.engine import Sample, UnreachableStoreError
from capo.configs.schema import RolloutConfig
from capo.protocol.errors import EngineError, WeightSyncError
from capo.protocol.messages import ActorSetup, GroupForm, UpdateWeights, WeightsReport
from capo.protocol.records import FloatArray, IntArray, VersionSpan

POLL_S = 0.004
EXTENSION = "capo.actors.vllm_weights.WorkerExtension"
BACKEND = "capo"
ENTROPY_COLUMNS = 2  # log-prob of the sampled token, entropy of its distribution
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on CPUs: the worker shares the core's process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # of vllm's own imports, in its child
}


class _Output(Struct, frozen=True):
    """The parts of vLLM's final output that are read here."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[tuple[str, int, int]]
    finish_reason: str


def transports() -> tuple[str, ...]:
    """How weights can reach an engine on this machine, best first."""
    import torch

    return ("nccl", "gloo") if torch.cuda.is_available() else ("gloo",)


async def start_engine(setup: ActorSetup, rollout: RolloutConfig, folder: Path) -> "VllmEngine":
    """Write the model folder, start vLLM on it. The event loop stays free meanwhile."""
    write_model_folder(setup, folder)
    started = time.monotonic()
    started_llm: list[Any] = []
    try:
        await asyncio.to_thread(_start_llm, setup, rollout, folder, started_llm)
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        raise EngineError(f"vLLM did not start: {error}") from error
    engine = VllmEngine(started_llm.pop(), rollout.tensor_parallel_size, time.monotonic() - started)
    if rollout.record_entropy:
        await engine.record_entropies()
    return engine


def write_model_folder(setup: ActorSetup, folder: Path) -> None:
    """`config.json` and the tokenizer's files, by plain names only."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {**setup.tokenizer_files, "config.json": setup.model_config}.items():
        if Path(name).name != name or name in ("", ".", ".."):
            raise EngineError(f"the learner sent a file named {name!r}, which is not a plain name")
        (folder / name).write_bytes(content)


def _start_llm(
    setup: ActorSetup, rollout: RolloutConfig, folder: Path, started_llm: list[Any]
) -> None:
    """Puts the AsyncLLM into a list: as a result it would stay in the thread's last frame, which
    an exception inside vllm keeps, and so be deleted only when the interpreter goes down.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if rollout.record_entropy:
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # see vllm_entropy
    import torch

    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside vllm; nothing a user can act on
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "dtype": setup.model_dtype,
        "seed": setup.seed % 2**31,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "max_model_len": setup.max_length,
        "max_num_seqs": rollout.concurrency + 1,  # one more for the probe
        "max_num_batched_tokens": max(4096, setup.max_length),
        "enable_prefix_caching": True,
        "enforce_eager": rollout.enforce_eager or on_cpu,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": EXTENSION,
    }
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = int(rollout.kv_cache_gib * 2**30)
        # vLLM 0.32 rewinds the generator of a seeded request whose prefill was cut in two, which
        # generators on CPUs cannot do: the engine would die.
        arguments["enable_chunked_prefill"] = False
        arguments["block_size"] = 32  # 128 by default: shorter dialogues would never hit the cache
    else:
        arguments["gpu_memory_utilization"] = rollout.gpu_memory_utilization
    started_llm.append(AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)))


class VllmEngine:
    """Owns one AsyncLLM. `broken` once set stays set: the actor has to end."""

    def __init__(self, llm: Any, workers: int, start_s: float) -> None:
        self.start_s = start_s
        self.version = -1
        self._broken = ""
        self.workers = workers
        self._llm = llm
        self._next_request = count()
        self._requests: set[str] = set()
        self._verified = asyncio.Event()  # unset while weights are in but not yet checked
        self._verified.set()
        self._updating = asyncio.Lock()
        self._group: GroupForm | None = None
        self._records_entropies = False

    @property
    def broken(self) -> str:
        """Also notices a core that died while nothing was asked of it."""
        if not self._broken and self._llm is not None and self._llm.errored:
            self._broken = "the inference engine's process died"
        return self._broken

    async def generate(
        self,
        prompt: IntArray,
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self.version < 0 and not self.broken:
            raise EngineError("the engine has no weights yet; it gets them from the next broadcast")
        records_entropies = self._records_entropies
        parameters = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop_token_ids=list(stop_token_ids),
            logprobs=ENTROPY_COLUMNS - 1 if records_entropies else 0,
            flat_logprobs=True,
            detokenize=False,
            skip_clone=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        completion = (await self._final(prompt, parameters)).outputs[0]
        spans = completion.weight_versions or ()
        output = _Output(
            completion.token_ids,
            completion.logprobs.logprobs if completion.logprobs is not None else (),
            [(span.version, span.start, span.end) for span in spans],
            completion.finish_reason or "",
        )
        # A sample that ended between new weights and their check counts only if the check passes.
        await self._verified.wait()
        if self.broken:
            raise EngineError(self.broken)
        return _sample(output, stop_token_ids, ENTROPY_COLUMNS if records_entropies else 1)

    async def record_entropies(self) -> None:
        """From now on samples carry the entropy of the distribution that each token came from."""
        try:
            await self._call(self._llm.collective_rpc("capo_record_entropies"))
        except WeightSyncError as error:
            raise EngineError(f"this engine cannot record entropies: {error}") from error
        self._records_entropies = True

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
            await self._call(self._llm.init_weight_transfer_engine(request))
            await self._finished(f"weight group {form.epoch}", form.timeout_s)
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
                self._break(str(error))
                return _failed(update, self.broken)
            finally:
                await self._end_requests_if_broken()

    async def close(self) -> None:
        self._break("the engine was closed")
        llm, self._llm = self._llm, None
        if llm is not None:
            resources = llm.engine_core.resources
            await asyncio.to_thread(llm.shutdown, 5.0)
            # vLLM closes its sockets, but not their context, which warns when it is collected.
            await asyncio.to_thread(resources.ctx.term)
        del llm
        gc.collect()  # it is in a cycle, and its __del__ fails once the interpreter goes down

    async def _update(self, update: UpdateWeights, group: GroupForm) -> WeightsReport:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        info = {
            "tensors": [[spec.name, spec.dtype, list(spec.shape)] for spec in update.tensors],
            "bucket_bytes": update.bucket_bytes,
            "checksum": update.checksum,
            "timeout_s": update.timeout_s,
        }
        await self._call(self._llm.collective_rpc("capo_stage", args=(info,)))
        await self._finished(f"weights of version {update.version}", update.timeout_s)

        self._verified.clear()
        try:
            paused_at = time.monotonic()
            await self._call(self._llm.pause_generation(mode="keep", clear_cache=True))
            await self._call(self._llm.start_weight_update())
            # Over NCCL the weights come now: when that breaks off, the engine stays paused.
            await self._call(
                self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
            )
            try:
                await self._call(self._llm.finish_weight_update(weight_version=str(update.version)))
            except WeightSyncError as error:
                raise EngineError(f"the model does not take the weights: {error}") from error
            await self._call(self._llm.resume_generation())
            pause_s = time.monotonic() - paused_at
            logprobs = await self._prompt_logprobs(update.probe)
            complaint = _compare(logprobs, update)
            if complaint:
                self._break(complaint)
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

    async def _finished(self, what: str, timeout_s: float) -> None:
        """Wait for what the workers do in a thread. Their own limit comes first."""
        deadline = time.monotonic() + timeout_s + 5.0
        while True:
            states = await self._call(self._llm.collective_rpc("capo_state"))
            for state in states:
                if state["error"] and not state["reached"]:
                    raise UnreachableStoreError(state["error"])
                if state["error"]:
                    raise WeightSyncError(state["error"])
            if not any(state["busy"] for state in states):
                return
            if time.monotonic() > deadline:
                raise WeightSyncError(f"{what}: the workers did not finish in {timeout_s:g} s")
            await asyncio.sleep(POLL_S)

    async def _prompt_logprobs(self, tokens: IntArray) -> FloatArray:
        """float32 [len(tokens) - 1] under the weights in the engine."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        result = await self._final(tokens, parameters)
        return np.asarray(result.prompt_logprobs.logprobs, dtype=np.float32)

    async def _final(self, prompt: IntArray, parameters: Any) -> Any:
        """The final output of one request; EngineError for whatever vLLM raises instead."""
        if self.broken:
            raise EngineError(self.broken)
        inputs = {"type": "token", "prompt_token_ids": prompt.tolist()}
        request = str(next(self._next_request))
        self._requests.add(request)
        result = None
        try:
            async for output in self._llm.generate(inputs, parameters, request):
                result = output
        except Exception as error:  # vLLM's own classes share no base
            if self._llm.errored:
                self._break(f"the inference engine died ({type(error).__name__}: {error})")
                raise EngineError(self.broken) from error
            raise EngineError(f"the engine refused a request: {error}") from error
        finally:
            self._requests.discard(request)
        if result is None:
            raise EngineError("the engine ended a request without an answer")
        return result

    async def _call(self, call: Any) -> Any:
        """A control call. EngineError if the engine is dead, WeightSyncError if only it failed."""
        try:
            return await call
        except Exception as error:  # vLLM wraps a worker's exception in classes without a base
            if self._llm.errored:
                raise EngineError(
                    f"the inference engine died in a weight update: {error}"
                ) from error
            raise WeightSyncError(f"the engine could not do its part: {error}") from error

    async def _end_requests_if_broken(self) -> None:
        """What is in flight in a broken, perhaps paused engine ends now, as an EngineError."""
        if self.broken and not self._llm.errored:
            await self._llm.abort(list(self._requests))

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason


def _sample(output: _Output, stop_token_ids: Sequence[int], columns: int) -> Sample:
    """`output.logprobs` holds `columns` numbers per token: log-prob and, if recorded, entropy."""
    tokens = np.asarray(output.tokens, dtype=np.int32)
    numbers = np.asarray(output.logprobs, dtype=np.float32)
    if len(tokens) == 0:
        raise EngineError(f"the engine sampled nothing (finish reason {output.finish_reason!r})")
    if len(tokens) * columns != len(numbers):
        raise EngineError(
            f"the engine gave {len(numbers)} numbers for {len(tokens)} tokens of {columns} each"
        )
    logprobs, *rest = np.ascontiguousarray(numbers.reshape(-1, columns).T)
    if not np.isfinite(logprobs).all():
        raise EngineError(
            f"the engine gave a log-prob of {logprobs[~np.isfinite(logprobs)][0]} for a token it "
            "sampled; its weights or its numerics are broken"
        )
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(f"the engine ended an action with {output.finish_reason!r}")
    versions = tuple(VersionSpan(int(version), end - start) for version, start, end in output.spans)
    if sum(span.num_tokens for span in versions) != len(tokens):
        raise EngineError(
            f"the engine named policy versions for {sum(span.num_tokens for span in versions)} "
            f"of {len(tokens)} tokens"
        )
    return Sample(
        tokens=tokens,
        logprobs=logprobs,
        versions=versions,
        stopped=int(tokens[-1]) in stop_token_ids,
        entropies=rest[0] if rest else None,
    )


def _compare(logprobs: FloatArray, update: UpdateWeights) -> str:
    """One sentence if the engine's log-probs of the probe are not the learner's, else ""."""
    if logprobs.shape != update.probe_logprobs.shape:
        return (
            f"the probe gave {len(logprobs)} log-probs, "
            f"the learner has {len(update.probe_logprobs)}"
        )
    if len(logprobs) == 0:
        return ""
    gap = np.abs(logprobs - update.probe_logprobs)
    worst = float(gap.max())
    if worst <= update.probe_tolerance:  # false for NaN
        return ""
    return (
        f"after the broadcast of version {update.version} this engine's log-probs of the probe are "
        f"off by {worst:.3g} nats (at most {update.probe_tolerance:g} are allowed): it does not "
        "have the learner's weights and stops sampling"
    )


def _failed(update: UpdateWeights, error: str, broke_off: bool = False) -> WeightsReport:
    return WeightsReport(
        epoch=update.epoch, version=update.version, error=error, broke_off=broke_off
    )
