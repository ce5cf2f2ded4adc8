"""New weights into a running engine: over a gloo group, and by way of a file, in one run.

python -m benchmarks.weight_sync [--sizes 20 381] [--repeats 5]

Learner and engine are separate processes on this machine. A sync is everything from the learner's
tensors to an engine that samples with them, our probe included; the pause is how long generation
stands still. The way over disk writes one safetensors file, pauses, lets vLLM reload it in place
(its own `reload_weights`, so no restart), and resumes; nothing is checked there. Medians are given.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from capo.actors.vllm_engine import VllmEngine
from capo.actors.vllm_start import start_engine
from capo.actors.weight_duty import WeightDuty
from capo.configs.schema import RolloutConfig
from capo.learner.weight_transfer_gloo import GlooTransport
from capo.learner.weights import BroadcastReport, WeightBroadcaster, WeightLimits
from capo.protocol.errors import WeightSyncError
from capo.protocol.messages import ActorSetup, ToActor, ToLearner

PROBE = np.arange(3, 51, dtype=np.int32)
SHAPES = {  # megabytes in float32: (hidden size, layers, vocabulary)
    20: (256, 4, 2000),
    381: (768, 10, 12000),
}


class Times(NamedTuple):
    sync_s: float
    pause_s: float


def build(megabytes: int) -> Qwen3ForCausalLM:
    hidden, layers, vocabulary = SHAPES[megabytes]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


@torch.no_grad()
def probe_logprobs(model: Qwen3ForCausalLM) -> np.ndarray:
    ids = torch.as_tensor(PROBE, dtype=torch.long)[None]
    logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()


@torch.no_grad()
def change(model: Qwen3ForCausalLM) -> None:
    """As an update does: every weight moves a little."""
    for parameter in model.parameters():
        parameter.mul_(0.999)


class OverGloo:
    """Learner's and engine's end, with a function call where a run has the wire."""

    def __init__(self, engine: VllmEngine, verbose: bool) -> None:
        self.verbose = verbose
        self._loop = asyncio.get_running_loop()
        self._tasks = asyncio.TaskGroup()
        self._duty = WeightDuty(engine, self._answer, lambda report: None, self._tasks)
        limits = WeightLimits(
            bucket_bytes=32 << 20,
            join_timeout_s=20.0,
            transfer_timeout_s=120.0,
            probe_tolerance=1e-3,
        )
        self._broadcaster = WeightBroadcaster(self._send, GlooTransport("127.0.0.1"), limits)

    async def sync(self, version: int, model: Qwen3ForCausalLM) -> Times:
        expected = probe_logprobs(model)
        async with self._tasks:
            started = time.perf_counter()
            report: BroadcastReport = await asyncio.to_thread(
                self._broadcaster.broadcast,
                version,
                model.named_parameters(),
                ["engine"],
                PROBE,
                expected,
            )
            sync_s = time.perf_counter() - started
        self._tasks = self._duty._tasks = asyncio.TaskGroup()
        if self.verbose:
            phases = {"stage": report.stage_s, "form": report.form_s, "transfer": report.transfer_s}
            print("      ", *(f"{name} {s * 1e3:.0f} ms" for name, s in phases.items()), flush=True)
        if report.dropped:
            raise WeightSyncError(str(report.dropped))
        return Times(sync_s, report.updated[0].pause_s)

    def _send(self, actor_id: str, message: ToActor) -> None:
        asyncio.run_coroutine_threadsafe(self._duty.handle(message), self._loop)

    async def _answer(self, message: ToLearner) -> None:
        self._broadcaster.receive("engine", message)


async def sync_over_disk(llm: object, model: Qwen3ForCausalLM, folder: Path) -> Times:
    started = time.perf_counter()
    save_file(dict(model.named_parameters()), folder / "model.safetensors")
    paused = time.perf_counter()
    await llm.pause_generation(mode="keep", clear_cache=True)
    await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    await llm.resume_generation()
    ended = time.perf_counter()
    return Times(ended - started, ended - paused)


async def measure(megabytes: int, repeats: int, verbose: bool) -> tuple[float, Times, Times]:
    model = build(megabytes)
    rollout = RolloutConfig(concurrency=8, kv_cache_gib=0.25)
    setup = ActorSetup(
        environment="",
        environment_options=b"{}",
        rollout=msgspec.json.encode(rollout),
        model_config=json.dumps(model.config.to_dict()).encode(),
        model_dtype="float32",
        max_length=512,
        tokenizer_files={},
        tokenizer_digest="",
        seed=0,
    )
    num_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as scratch:
        engine = await start_engine(setup, rollout, Path(scratch, "model"))
        over_gloo, over_disk = [], []
        gloo = OverGloo(engine, verbose)
        on_disk = Path(scratch, "disk")
        on_disk.mkdir()
        from_file = {"load_config": {"load_format": "safetensors"}}
        await engine._llm.collective_rpc("update_config", args=(from_file,))
        for version in range(repeats + 1):  # the first of each warms up
            change(model)
            over_gloo.append(await gloo.sync(version, model))
            over_disk.append(await sync_over_disk(engine._llm, model, on_disk))
        await engine.close()
    return num_bytes / 1e6, median(over_gloo[1:]), median(over_disk[1:])


def median(times: list[Times]) -> Times:
    return Times(*(statistics.median(column) for column in zip(*times, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--verbose", action="store_true", help="also the phases of every sync")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'MB':>6} {'gloo sync':>10} {'pause':>8} {'disk sync':>10} {'pause':>8} {'ratio':>6}")
    for size in options.sizes:
        megabytes, gloo, disk = asyncio.run(measure(size, options.repeats, options.verbose))
        print(
            f"{megabytes:6.0f} {gloo.sync_s * 1e3:7.0f} ms {gloo.pause_s * 1e3:5.0f} ms "
            f"{disk.sync_s * 1e3:7.0f} ms {disk.pause_s * 1e3:5.0f} ms "
            f"{disk.sync_s / gloo.sync_s:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
