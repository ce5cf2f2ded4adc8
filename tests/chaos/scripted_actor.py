"""An actor process whose engine is a script: everything else, the weight groups included, is real.

What it samples depends on the action's seed alone. It joins the learner's gloo groups, receives the
weights, compares the checksum of what arrived and writes down which versions it got, line by line,
so that a kill loses nothing of it.
"""

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from capo.actors import gloo_group
from capo.actors.engine import Sample
from capo.actors.worker import Worker
from capo.configs.schema import RolloutConfig
from capo.launch.address import FollowsRun, await_address
from capo.protocol.errors import CapoError, WeightSyncError
from capo.protocol.messages import ActorSetup, GroupForm, UpdateWeights, WeightsReport
from capo.protocol.records import FloatArray, IntArray, VersionSpan
from capo.protocol.weight_layout import layout

NUM_WORDS = 14  # the last tokens of the vocabulary: the world's words, with and without a space


class Log:
    """JSON lines; each is handed to the kernel before `write` returns."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, event: str, **fields: object) -> None:
        line = json.dumps({"event": event, "at": time.time(), **fields}) + "\n"
        os.write(self._descriptor, line.encode())


class ProbedModel:
    """The policy by transformers alone: what it says of the probe is the truth about weights."""

    def __init__(self, model_config: bytes) -> None:
        config = Qwen3Config(**json.loads(model_config), attn_implementation="eager")
        self._model = Qwen3ForCausalLM(config).float().eval()

    @torch.no_grad()
    def logprobs(self, update: UpdateWeights, stream: torch.Tensor) -> FloatArray:
        """float32 [len(probe) - 1] under the weights in `stream`."""
        plan = layout(update.tensors)
        weights = {
            spec.name: stream[offset : offset + size]
            .view(getattr(torch, spec.dtype))
            .view(spec.shape)
            for spec, offset, size in zip(update.tensors, plan.offsets, plan.sizes, strict=True)
        }
        self._model.load_state_dict(weights)
        probe = torch.from_numpy(update.probe.astype(np.int64))
        logits = self._model(input_ids=probe[None]).logits[0, :-1].log_softmax(-1)
        chosen = logits.gather(-1, probe[1:, None])[:, 0]
        return np.ascontiguousarray(chosen.numpy(), dtype=np.float32)


class GlooScriptedEngine:
    """`fault` is what it does wrong, in every `fault_every`-th action by its seed."""

    def __init__(
        self,
        setup: ActorSetup,
        log: Log,
        *,
        token_s: float = 0.0,
        fault: str = "",
        fault_every: int = 8,
    ) -> None:
        self.version = -1
        self.broken = ""
        self.workers = 1
        self._model = ProbedModel(setup.model_config)
        self._vocabulary = json.loads(setup.model_config)["vocab_size"]
        self._log = log
        self._token_s = token_s
        self._fault = fault
        self._fault_every = fault_every
        self._group: Any = None
        self._epoch = -1

    async def generate(
        self,
        prompt: IntArray,
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        started = self.version
        rng = np.random.default_rng(seed)
        length = int(rng.integers(2, max(3, max_tokens + 1)))
        tokens = rng.integers(self._vocabulary - NUM_WORDS, self._vocabulary, length)
        tokens[-1] = stop_token_ids[0]
        tokens = tokens[:max_tokens].astype(np.int32)
        await asyncio.sleep(self._token_s * len(tokens))
        logprobs = np.full(len(tokens), -np.log(self._vocabulary), dtype=np.float32)
        if self._fault and seed % self._fault_every == 0:
            if self._fault == "nan":
                logprobs[0] = np.nan
            elif self._fault == "empty":
                tokens, logprobs = tokens[:0], logprobs[:0]
            elif self._fault == "raise":
                raise RuntimeError("illegal memory access")
            elif self._fault == "die":
                self.broken = "the inference engine's process died"
                raise WeightSyncError(self.broken)
        return Sample(
            tokens=tokens,
            logprobs=logprobs,
            versions=_spans(started, self.version, len(tokens)),
            stopped=len(tokens) > 0 and int(tokens[-1]) in stop_token_ids,
        )

    async def overdue(self, begun_at: float) -> None:
        pass

    async def form_group(self, form: GroupForm) -> None:
        self._log.write("form", epoch=form.epoch, world_size=form.world_size)
        self._drop_group()
        group = await asyncio.to_thread(
            gloo_group.join,
            form.host,
            form.port,
            form.epoch,
            form.rank,
            form.world_size,
            form.timeout_s,
        )
        self._drop_group()
        self._group, self._epoch = group, form.epoch

    async def update_weights(self, update: UpdateWeights) -> WeightsReport:
        self._log.write("update", epoch=update.epoch, version=update.version)
        group = self._group
        if group is None or self._epoch != update.epoch:
            return _failed(update, f"not in weight group {update.epoch}")
        total_bytes = layout(update.tensors).total_bytes
        try:
            stream, checksum = await asyncio.to_thread(
                gloo_group.receive, group, total_bytes, update.bucket_bytes, update.timeout_s
            )
        except WeightSyncError as error:
            return _failed(update, str(error))
        if self._epoch != update.epoch:  # a later group took its place meanwhile
            return _failed(update, f"weight group {update.epoch} was given up")
        if checksum != update.checksum:
            return _failed(update, f"checksum {checksum}, the learner's is {update.checksum}")
        logprobs = self._model.logprobs(update, stream)
        self.version = update.version
        self._log.write("weights", epoch=update.epoch, version=update.version, checksum=checksum)
        return WeightsReport(
            epoch=update.epoch,
            version=update.version,
            checksum=checksum,
            probe_logprobs=logprobs,
        )

    async def close(self) -> None:
        self._drop_group()

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def _spans(first: int, last: int, length: int) -> tuple[VersionSpan, ...]:
    """The weights may have changed while the action was sampled: then in its middle."""
    if first == last or length < 2:
        return (VersionSpan(first, length),) if length else ()
    return (VersionSpan(first, length // 2), VersionSpan(last, length - length // 2))


def _failed(update: UpdateWeights, error: str) -> WeightsReport:
    return WeightsReport(epoch=update.epoch, version=update.version, error=error, broke_off=True)


def run(
    address: str,
    name: str,
    log_path: str,
    token_s: float = 0.0,
    fault: str = "",
    fault_every: int = 8,
    patience_s: float = float("inf"),
) -> int:
    """The exit code of one actor that works until it is sent home, or stopped by SIGINT.

    `address` may be the folder of a run.
    """
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    log = Log(Path(log_path))

    async def start(setup: ActorSetup, rollout: RolloutConfig) -> GlooScriptedEngine:
        return GlooScriptedEngine(setup, log, token_s=token_s, fault=fault, fault_every=fault_every)

    first, locate = address, None
    if "://" not in address:
        first = await_address(Path(address), patience_s, print)
        locate = FollowsRun(Path(address), first, guarded=False)

    async def work() -> None:
        worker = Worker(start, ("gloo",), name=name, progress=lambda line: print(line, flush=True))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, lambda: worker.drain("the actor was stopped"))
        await worker.run(first, None, patience_s, locate)

    try:
        asyncio.run(work())
    except CapoError as error:
        print(f"actor {name}: {error}", flush=True)
        return 1
    return 0
