"""A real vLLM engine on its own loop, the model it should have, and a learner's sending end."""

import asyncio
import gc
import json
import threading
import warnings
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import uvloop
from transformers import Qwen3Config, Qwen3ForCausalLM

from capo.actors.vllm_engine import VllmEngine
from capo.actors.vllm_start import start_engine
from capo.actors.weight_duty import WeightDuty
from capo.configs.schema import RolloutConfig
from capo.learner.weight_transfer_gloo import GlooTransport
from capo.learner.weights import BroadcastReport, WeightBroadcaster, WeightLimits
from capo.protocol.messages import ActorSetup, WeightsReport
from capo.protocol.records import FloatArray, IntArray

T = TypeVar("T")
STOP = 1
PROBE = np.arange(3, 40, dtype=np.int32)
LIMITS = WeightLimits(
    bucket_bytes=50_000, join_timeout_s=20.0, transfer_timeout_s=30.0, probe_tolerance=1e-3
)


def tiny_policy(seed: int) -> Qwen3ForCausalLM:
    """Random weights large enough that two seeds differ by nats; embeddings are tied."""
    config = Qwen3Config(
        vocab_size=90,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.08 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def logprobs_of(model: Qwen3ForCausalLM, tokens: IntArray, temperature: float = 1.0) -> FloatArray:
    """float32 [n - 1] of `tokens[1:]`, by one full forward pass."""
    ids = torch.as_tensor(tokens, dtype=torch.long)[None]
    logits = model(ids).logits[0, :-1] / temperature
    out = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return out.numpy()


@contextmanager
def vllm_leaves_contexts_open() -> Iterator[None]:
    """vLLM 0.32 leaves ZeroMQ contexts to the garbage collector; what is collected here is its."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


class EngineWorld:
    def __init__(self, folder: Path) -> None:
        self.loop = uvloop.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.policy = tiny_policy(0)
        rollout = RolloutConfig(concurrency=16, kv_cache_gib=0.25)
        setup = ActorSetup(
            environment="",
            environment_options=b"{}",
            rollout=msgspec.json.encode(rollout),
            model_config=json.dumps(self.policy.config.to_dict()).encode(),
            model_dtype="float32",
            max_length=512,
            tokenizer_files={},
            tokenizer_digest="",
            seed=0,
        )
        with vllm_leaves_contexts_open():
            self.engine: VllmEngine = self.run(start_engine(setup, rollout, folder))
        self.reports: list[WeightsReport] = []
        self.others: dict[str, Any] = {}  # members that are no engines: callables of a message
        self.transport = GlooTransport("127.0.0.1")
        self.broadcaster = WeightBroadcaster(self.send, self.transport, LIMITS, first_epoch=1)
        self.duty = WeightDuty(self.engine, self.answer, self.reports.append, self.loop)  # type: ignore[arg-type]

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 180.0) -> T:
        return self.start(work).result(timeout_s)

    def send(self, actor_id: str, message: Any) -> None:
        if actor_id == "engine":
            self.start(self.duty.handle(message))
        else:
            self.others[actor_id](message)

    async def answer(self, message: Any) -> None:
        self.broadcaster.receive("engine", message)

    def broadcast(
        self,
        version: int,
        policy: Qwen3ForCausalLM,
        *members: str,
        probe_logprobs: FloatArray | None = None,
    ) -> BroadcastReport:
        if probe_logprobs is None:
            probe_logprobs = logprobs_of(policy, PROBE)
        report = self.broadcaster.broadcast(
            version, policy.named_parameters(), members or ("engine",), PROBE, probe_logprobs
        )
        self.policy = policy
        return report

    def generate(self, prompt: IntArray, **changes: Any) -> "Future[Any]":
        options = {"max_tokens": 8, "temperature": 1.0, "seed": 5, "stop_token_ids": [STOP]}
        return self.start(self.engine.generate(prompt, **(options | changes)))

    def close(self) -> None:
        with vllm_leaves_contexts_open():
            self.run(self.engine.close())
        self.broadcaster.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()
