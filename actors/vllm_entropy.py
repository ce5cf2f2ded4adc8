"""The behaviour policy's entropy per sampled token, measured inside vLLM's worker.

vLLM returns log-probs of the likeliest tokens and no entropies, and those of the whole vocabulary
are too much to send. So in an engine that records entropies, the one column of "likeliest tokens"
that `SamplingParams(logprobs=1)` asks for carries the entropy instead: exact, one number a token,
of the distribution that was sampled from, and lined up with the sampled log-probs by vLLM itself,
also when a request is preempted or weights change in the middle of it.

Works on the sampler of vLLM's V1 model runner alone: vllm_start chooses it.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from capo.actors.vllm_sample import ENTROPY_COLUMNS
from capo.protocol.errors import EngineError


def install(model_runner: Any) -> None:
    """From now on requests with `logprobs=1` get (log-prob, entropy) per sampled token."""
    sampler = getattr(model_runner, "sampler", None)
    if not isinstance(sampler, Sampler):
        raise EngineError(
            f"rollout.record_entropy needs the sampler of vLLM's V1 model runner, but this engine "
            f"has {type(sampler).__module__}; set VLLM_USE_V2_MODEL_RUNNER=0 for the actor"
        )
    sampler.gather_logprobs = gather_with_entropy


def gather_with_entropy(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """In place of `Sampler.gather_logprobs`. logprobs [n, vocabulary], token_ids int64 [n]."""
    gathered = Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
    if num_logprobs + 1 != ENTROPY_COLUMNS:
        return gathered  # somebody asks for log-probs alone, as the probe does
    columns = torch.stack([gathered.logprobs[:, 0], entropy(logprobs)], dim=1)
    return gathered._replace(logprobs=columns)


def entropy(logprobs: Tensor) -> Tensor:
    """Nats, [n] of log-probs [n, vocabulary]; a token of log-prob -inf adds nothing."""
    nats: Tensor = torch.special.entr(logprobs.exp()).sum(dim=-1)
    return nats
