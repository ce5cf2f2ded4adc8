"""Passes over a whole batch without gradient: log-probs per token, values per reading.

E episodes, K actions, N trained tokens. Every rank reads its share; a result that each rank
filled in for its own part, zero elsewhere, is whole after a sum over ranks, exactly.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from msgspec import Struct
from torch import Tensor

from capo.learner.batch import Batch
from capo.learner.microbatch import Microbatch, collate
from capo.learner.model import CriticModel, PolicyModel
from capo.learner.packing import pack
from capo.learner.ranks import Ranks


class Scores(Struct, frozen=True):
    logprobs: Tensor  # [N]
    entropies: Tensor | None  # [N]


class Values(Struct, frozen=True):
    """`readings` are [K] at action boundaries or [N] before every trained token."""

    readings: Tensor
    bootstraps: Tensor  # [E], 0 where the episode was not truncated


@torch.no_grad()
def score(
    model: PolicyModel,
    microbatches: Sequence[Microbatch],
    num_tokens: int,
    temperature: float,
    ranks: Ranks,
    *,
    with_entropy: bool = False,
) -> Scores:
    """Log-probs of all trained tokens of the batch, whatever microbatches they lie in."""
    dtype = torch.promote_types(model.precision.parameter, torch.float32)
    logprobs = torch.zeros(num_tokens, dtype=dtype, device=ranks.device)
    entropies = torch.zeros_like(logprobs) if with_entropy else None
    for microbatch in microbatches:
        scored, entropy = model(microbatch, temperature, with_entropy)
        logprobs[microbatch.tokens] = scored
        if entropies is not None:
            entropies[microbatch.tokens] = entropy
    return Scores(ranks.sum(logprobs), None if entropies is None else ranks.sum(entropies))


@torch.no_grad()
def read_values(
    model: CriticModel,
    batch: Batch,
    reads: Literal["boundary", "token"],
    token_budget: int,
    ranks: Ranks,
) -> Values:
    """The critic's values, with the bootstrap of truncated episodes read in the same pass."""
    dtype = torch.promote_types(model.precision.parameter, torch.float32)
    total = batch.num_actions if reads == "boundary" else batch.num_tokens
    readings = torch.zeros(total, dtype=dtype, device=ranks.device)
    bootstraps = torch.zeros(len(batch.episodes), dtype=dtype, device=ranks.device)
    lengths = [len(one.placed.segment.token_ids) for one in batch.value_segments]
    for chosen in pack(lengths, token_budget, ranks.world_size)[ranks.rank]:
        parts = [batch.value_segments[index] for index in chosen]
        microbatch = collate([part.placed for part in parts], ranks.device)
        ends = [number for number, part in enumerate(parts) if part.bootstrap_of is not None]
        owners = [part.bootstrap_of for part in parts if part.bootstrap_of is not None]
        positions, index = critic_readings(microbatch, reads)
        values = model(microbatch, torch.cat([positions, microbatch.last_tokens[ends]]))
        readings[index] = values[: len(positions)]
        bootstraps[owners] = values[len(positions) :]
    return Values(ranks.sum(readings), ranks.sum(bootstraps))


def critic_readings(
    microbatch: Microbatch, reads: Literal["boundary", "token"]
) -> tuple[Tensor, Tensor]:
    """Positions in the packed row where the critic is read, and which of the batch's readings
    these are."""
    if reads == "boundary":
        return microbatch.boundaries, microbatch.actions
    return microbatch.predictors, microbatch.tokens
