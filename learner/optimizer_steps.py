"""One minibatch: the policy's and the critic's optimizer step, and what they were like.

k actions of the minibatch. Parts are microbatches, of all ranks; sums over parts are divided by
global counts only.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from msgspec import Struct
from torch import Tensor

from capo.configs.algorithms import AlgorithmConfig, needs_logprob_statistics
from capo.learner.engines import TrainEngine
from capo.learner.microbatch import Microbatch
from capo.learner.minibatches import Minibatch
from capo.learner.model import CriticModel, PolicyModel
from capo.learner.objective import (
    PolicyLoss,
    Statistics,
    minibatch_statistics,
    policy_divisor,
    policy_loss,
)
from capo.learner.passes import critic_readings
from capo.learner.policy_inputs import PolicyInputs
from capo.learner.ranks import Ranks
from capo.learner.value_loss import value_loss

ACTION_COLUMNS = (
    "log_ratio", "z_sum", "kept_tokens", "units", "out_of_range", "active", "clamped",
)  # fmt: skip


class PolicyStep(Struct, frozen=True, kw_only=True, eq=False):
    mu: float
    loss: float
    kl: float
    grad_norm: float
    lr: float
    columns: Tensor  # float64 [len(ACTION_COLUMNS), k], of all ranks


class CriticStep(Struct, frozen=True, kw_only=True, eq=False):
    loss: float
    clipped: float  # fraction of readings
    grad_norm: float
    lr: float


def policy_step(
    engine: TrainEngine[PolicyModel],
    minibatch: Minibatch,
    inputs: PolicyInputs,
    algorithm: AlgorithmConfig,
    ranks: Ranks,
    *,
    temperature: float,
    lr: float,
    moved: bool,
) -> PolicyStep:
    """`inputs` of the whole batch; `moved`: the policy is no longer the proximal one.

    The objective needs statistics of the whole minibatch. With one microbatch a rank they come
    from the pass that has the gradient anyway; with several, from a pass before it.
    """
    microbatches = minibatch.microbatches
    parts = [inputs.select(microbatch.actions) for microbatch in microbatches]
    statistics: Statistics | None = None
    first: Tensor | None = None
    if not moved or not needs_logprob_statistics(algorithm):
        statistics = _total([minibatch_statistics(None, part, algorithm) for part in parts], ranks)
    elif len(microbatches) == 1:
        first, _ = engine.forward(microbatches[0], temperature)
        statistics = _total([minibatch_statistics(first, parts[0], algorithm)], ranks)
    else:
        statistics = _total(
            [
                minibatch_statistics(_peek(engine, microbatch, temperature), part, algorithm)
                for microbatch, part in zip(microbatches, parts, strict=True)
            ],
            ranks,
        )

    divisor = policy_divisor(statistics, algorithm)
    columns = torch.zeros(
        len(ACTION_COLUMNS), len(minibatch.actions), dtype=torch.float64, device=ranks.device
    )
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for number, (microbatch, part) in enumerate(zip(microbatches, parts, strict=True)):
        logprobs = first if first is not None else engine.forward(microbatch, temperature)[0]
        loss = policy_loss(logprobs, part, statistics, algorithm)
        engine.backward(loss.loss_sum, divisor, last=number == len(microbatches) - 1)
        columns[:, minibatch.positions(microbatch.actions)] = _columns(loss)
        sums += torch.stack([loss.loss_sum.detach(), loss.kl_sum]).double()
    grad_norm = engine.step(lr)
    loss_total, kl_total = (ranks.sum(sums) / divisor).tolist()
    return PolicyStep(
        mu=float(statistics.mu),
        loss=loss_total,
        kl=kl_total,
        grad_norm=grad_norm,
        lr=lr,
        columns=ranks.sum(columns),
    )


def critic_step(
    engine: TrainEngine[CriticModel],
    minibatch: Minibatch,
    old_values: Tensor,
    returns: Tensor,
    ranks: Ranks,
    *,
    reads: Literal["boundary", "token"],
    num_readings: int,
    clip: float | None,
    lr: float,
) -> CriticStep:
    """`old_values` and `returns` of all the batch's readings; `num_readings` of the minibatch."""
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for number, microbatch in enumerate(minibatch.microbatches):
        positions, index = critic_readings(microbatch, reads)
        values = engine.forward(microbatch, positions)
        loss = value_loss(values, old_values[index], returns[index], clip)
        last = number == len(minibatch.microbatches) - 1
        engine.backward(loss.loss_sum, num_readings, last=last)
        sums += torch.stack([loss.loss_sum.detach(), loss.clipped_sum]).double()
    grad_norm = engine.step(lr)
    loss_mean, clipped = (ranks.sum(sums) / num_readings).tolist()
    return CriticStep(loss=loss_mean, clipped=clipped, grad_norm=grad_norm, lr=lr)


@torch.no_grad()
def _peek(engine: TrainEngine[PolicyModel], microbatch: Microbatch, temperature: float) -> Tensor:
    logprobs, _ = engine.model(microbatch, temperature)
    assert isinstance(logprobs, Tensor)
    return logprobs


def _total(parts: Sequence[Statistics], ranks: Ranks) -> Statistics:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return Statistics(ranks.sum(total.sums))


def _columns(loss: PolicyLoss) -> Tensor:
    return torch.stack([getattr(loss, name) for name in ACTION_COLUMNS]).double()
