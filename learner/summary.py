"""From what the steps left behind to the update's record and its metrics.

K actions of the batch, k of a minibatch, N trained tokens. Metric names: docs/metrics.md.
"""

from collections.abc import Sequence

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from capo.learner.action_metrics import ActionTable, action_metrics
from capo.learner.batch import Batch
from capo.learner.batch_metrics import batch_metrics
from capo.learner.behaviour import Correction
from capo.learner.credit import Targets
from capo.learner.minibatches import Minibatch
from capo.learner.optimizer_steps import ACTION_COLUMNS, CriticStep, PolicyStep
from capo.learner.passes import Scores, Values
from capo.learner.results import ActionResults, Floats, MinibatchResult


class Step(Struct, frozen=True):
    """One minibatch and what its optimizer steps left behind; no critic, no `critic`."""

    minibatch: Minibatch
    policy: PolicyStep
    critic: CriticStep | None


def minibatch_result(step: Step) -> MinibatchResult:
    """The record of one optimizer step, its columns as float64 arrays [k]."""
    columns = _named_columns(step.policy)
    return MinibatchResult(
        epoch=step.minibatch.epoch,
        episodes=step.minibatch.episodes,
        actions=step.minibatch.actions,
        mu=step.policy.mu,
        policy_loss=step.policy.loss,
        kl=step.policy.kl,
        policy_grad_norm=step.policy.grad_norm,
        policy_lr=step.policy.lr,
        critic_loss=step.critic.loss if step.critic else None,
        critic_grad_norm=step.critic.grad_norm if step.critic else None,
        critic_lr=step.critic.lr if step.critic else None,
        log_ratio=columns["log_ratio"],
        units=columns["units"],
        out_of_range=columns["out_of_range"],
        active=columns["active"],
    )


def action_results(
    batch: Batch, correction: Correction, targets: Targets, values: Values | None
) -> ActionResults:
    """What every action [K] had before the first step; of token-wise weights, masks and values the
    mean, whether any is kept, and the first."""
    return ActionResults(
        episode=batch.episode_of_action,
        step=batch.step_of_action,
        length=batch.lengths,
        advantage=_array(targets.advantages),
        weight=_array(correction.action_weights) * _means(batch, correction.token_weights),
        kept=correction.action_kept.cpu().numpy() & (_means(batch, correction.token_kept) > 0),
        counted=targets.counted.cpu().numpy(),
        value=None if values is None else _per_action(batch, values.readings),
        returns=None if targets.returns is None else _per_action(batch, targets.returns),
    )


def update_metrics(
    batch: Batch,
    version: int,
    actions: ActionResults,
    steps: Sequence[Step],
    proximal: Scores,
    correction: Correction,
) -> dict[str, float]:
    """Finite numbers under flat names; what is undefined is absent."""
    metrics = {
        **batch_metrics(batch, version),
        "batch/microbatches": float(sum(len(step.minibatch.microbatches) for step in steps)),
        **_step_metrics(steps),
        **action_metrics(_table(batch, version, actions, steps, proximal, correction)),
    }
    if proximal.entropies is not None:
        metrics["policy/entropy"] = float(proximal.entropies.double().mean())
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


def _step_metrics(steps: Sequence[Step]) -> dict[str, float]:
    policy = [step.policy for step in steps]
    critic = [step.critic for step in steps if step.critic is not None]
    metrics = {
        "policy/loss": float(np.mean([one.loss for one in policy])),
        "policy/kl": float(np.mean([one.kl for one in policy])),
        "policy/mu": float(np.mean([one.mu for one in policy])),
        "policy/grad_norm": float(np.mean([one.grad_norm for one in policy])),
        "policy/grad_norm_max": float(np.max([one.grad_norm for one in policy])),
        "policy/lr": policy[-1].lr,
        "policy/skipped_steps": float(sum(not np.isfinite(one.grad_norm) for one in policy)),
    }
    if critic:
        metrics |= {
            "critic/loss": float(np.mean([one.loss for one in critic])),
            "critic/clipped": float(np.mean([one.clipped for one in critic])),
            "critic/grad_norm": float(np.mean([one.grad_norm for one in critic])),
            "critic/grad_norm_max": float(np.max([one.grad_norm for one in critic])),
            "critic/lr": critic[-1].lr,
            "critic/skipped_steps": float(sum(not np.isfinite(one.grad_norm) for one in critic)),
        }
    return metrics


def _table(
    batch: Batch,
    version: int,
    actions: ActionResults,
    steps: Sequence[Step],
    proximal: Scores,
    correction: Correction,
) -> ActionTable:
    """One row per action and epoch, in the order of the steps."""
    rows = np.concatenate([step.minibatch.actions for step in steps])
    named = [_named_columns(step.policy) for step in steps]
    columns = {name: np.concatenate([one[name] for one in named]) for name in ACTION_COLUMNS}
    gap = batch.behaviour_logprobs.astype(np.float64) - _array(proximal.logprobs)
    return ActionTable(
        length=batch.lengths[rows],
        turn=batch.step_of_action[rows],
        version=batch.versions[rows],
        staleness=version - batch.versions[rows],
        advantage=actions.advantage[rows],
        mismatch_sum=_sums(batch, gap)[rows],
        mismatch_k3_sum=_sums(batch, np.expm1(-gap) + gap)[rows],
        weight=actions.weight[rows],
        weight_truncated=correction.truncated.cpu().numpy()[rows],
        kept=actions.kept[rows],
        centred_sum=np.concatenate([_centred_sums(one) for one in named]),
        value=None if actions.value is None else actions.value[rows],
        returns=None if actions.returns is None else actions.returns[rows],
        **columns,
    )


def _named_columns(step: PolicyStep) -> dict[str, Floats]:
    return dict(zip(ACTION_COLUMNS, _array(step.columns), strict=True))


def _centred_sums(columns: dict[str, Floats]) -> Floats:
    """Of one minibatch -> [k], with its own mean of z: also where the ratio is not centred."""
    z_sum, tokens = columns["z_sum"], columns["kept_tokens"]
    centred: Floats = z_sum - tokens * (z_sum.sum() / max(tokens.sum(), 1.0))
    return centred


def _per_action(batch: Batch, readings: Tensor) -> Floats:
    """Readings per action as they are; of readings per token, that before the first token."""
    array = _array(readings)
    if len(array) == batch.num_actions:
        return array
    first: Floats = array[np.cumsum(batch.lengths) - batch.lengths]
    return first


def _sums(batch: Batch, per_token: NDArray[np.float64]) -> Floats:
    sums: Floats = np.add.reduceat(per_token, np.cumsum(batch.lengths) - batch.lengths)
    return sums


def _means(batch: Batch, per_token: Tensor) -> Floats:
    return _sums(batch, _array(per_token)) / batch.lengths


def _array(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().to("cpu", torch.float64).numpy()
    return array
