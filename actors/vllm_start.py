"""Starts vLLM for an actor: where it runs, its arguments, the model folder it is started on.

The engine starts with dummy weights from the model's config alone; the first broadcast fills it.
Its core runs in a child process that ends with this one. vLLM is imported when an engine is started
(10-20 s), not with this module.
"""

import asyncio
import os
import warnings
from pathlib import Path
from typing import Any

from capo.actors.setup_files import write_files
from capo.actors.vllm_engine import VllmEngine
from capo.configs.schema import RolloutConfig
from capo.protocol.errors import EngineError
from capo.protocol.messages import ActorSetup

BACKEND = "capo"  # the name under which vllm_weights registers itself
EXTENSION = "capo.actors.vllm_weights.WorkerExtension"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on CPUs: the worker shares the core's process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # of vllm's own imports, in its child
}


def transports() -> tuple[str, ...]:
    """How weights can reach an engine on this machine, best first."""
    import torch

    return ("nccl", "gloo") if torch.cuda.is_available() else ("gloo",)


async def start_engine(setup: ActorSetup, rollout: RolloutConfig, folder: Path) -> VllmEngine:
    """Write the model folder, start vLLM on it. The event loop stays free meanwhile.

    Raises EngineError if vLLM does not start, ConfigError for a file name that leaves `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_files({**setup.tokenizer_files, "config.json": setup.model_config}, folder)
    started_llm: list[Any] = []
    try:
        await asyncio.to_thread(_start_llm, setup, rollout, folder, started_llm)
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        raise EngineError(f"vLLM did not start: {error}") from error
    engine = VllmEngine(
        started_llm.pop(),
        rollout.tensor_parallel_size,
        limit_s=rollout.engine_timeout_s,
    )
    if rollout.record_entropy:
        await engine.record_entropies()
    return engine


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

    arguments = _arguments(setup, rollout, folder, on_cpu)
    started_llm.append(AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)))


def _arguments(
    setup: ActorSetup, rollout: RolloutConfig, folder: Path, on_cpu: bool
) -> dict[str, Any]:
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
    return arguments
