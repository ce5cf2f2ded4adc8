"""The surrogate objective that an algorithm's parts compose: ratio, clipping, weights, aggregation.

N tokens, K actions, U ratio units (actions or tokens). The only place that chooses between ratios
and between clippings; each of them is a pure function elsewhere.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from capo.configs.algorithms import AlgorithmConfig
from capo.learner import aggregation, clipping, ratios
from capo.learner.behaviour import entropy_normalised_kept
from capo.learner.policy_inputs import PolicyInputs
from capo.learner.ragged import action_sums, check_rows, check_tokens


class View(NamedTuple):
    """The part as the current policy sees it."""

    z: Tensor  # [N] with gradient
    clamped: Tensor  # bool [N]
    kept: Tensor  # bool [N], enters ratios and mu
    lengths: Tensor  # [K], kept tokens
    num_actions: int


class Weighted(NamedTuple):
    """The surrogate by unit, and what each unit counts (weights, masks and aggregation in one)."""

    parts: clipping.Surrogate
    log_ratio: Tensor  # [U]
    shares: Tensor  # [U], detached; 0 where a unit is dropped
    action_of_unit: Tensor  # int64 [U]

    def total(self) -> Tensor:
        return (torch.where(self.shares > 0, self.parts.objective, 0.0) * self.shares).sum()


def view_of(logprobs: Tensor, inputs: PolicyInputs, algorithm: AlgorithmConfig) -> View:
    """`logprobs [N]` of the current policy. Raises ValueError for shapes that do not agree."""
    num_actions = inputs.advantages.shape[0]
    check_tokens(inputs.action_of_token, logprobs, inputs.token_advantages, inputs.token_kept)
    check_rows(num_actions, "actions", inputs.action_weights, inputs.action_kept, inputs.counted)
    z, clamped = ratios.token_log_ratios(logprobs, old_logprobs_of(inputs, algorithm))
    kept = inputs.token_kept & inputs.counted[inputs.action_of_token]
    if algorithm.estr_tau is not None:
        if inputs.entropies is None:
            raise ValueError("estr_tau needs the behaviour policy's entropies, got None.")
        kept = kept & entropy_normalised_kept(
            logprobs, inputs.behaviour_logprobs, inputs.entropies, algorithm.estr_tau
        )
    lengths = action_sums(kept.to(z.dtype), inputs.action_of_token, num_actions)
    return View(z, clamped, kept, lengths, num_actions)


def weighted_surrogate(
    logprobs: Tensor, inputs: PolicyInputs, view: View, mu: Tensor, algorithm: AlgorithmConfig
) -> Weighted:
    """To be maximised. `view` is that of `logprobs [N]`; `mu` (scalar) is 0 without centring."""
    a, index = algorithm, inputs.action_of_token
    alive = inputs.counted & inputs.action_kept & (view.lengths > 0)
    if a.ratio == "calibrated" or a.clipping == "gmpo":
        if a.clipping == "gmpo":
            log_ratio = ratios.geometric_log_ratio(
                view.z * view.kept,
                inputs.token_advantages,
                index,
                view.lengths,
                a.clip_low,
                a.clip_high,
            )
            parts = _gmpo(log_ratio, inputs, view, a)
        else:
            log_ratio = ratios.calibrated_log_ratio(
                view.z * view.kept, index, view.lengths, a.alpha, mu
            )
            parts = clipping.clipped(
                log_ratio, inputs.advantages.to(log_ratio), a.clip_low, a.clip_high, a.dual_clip
            )
        shares = aggregation.action_shares(a.aggregation, view.lengths)
        shares = shares * inputs.action_weights * alive
        everyone = torch.arange(view.num_actions, device=index.device)
        return Weighted(parts, log_ratio, shares.detach(), everyone)

    log_ratio = view.z
    if a.ratio == "sequence":
        log_ratio = ratios.sequence_log_ratio(view.z, index, view.num_actions, view.kept)
    advantages = inputs.token_advantages.to(log_ratio)
    if a.clipping == "cispo":
        parts = clipping.cispo(log_ratio, advantages, logprobs, a.clip_low, a.clip_high)
    elif a.clipping == "band":
        parts = clipping.band(log_ratio, advantages, a.clip_low, a.clip_high)
    elif a.clipping == "soft_gate":
        parts = clipping.soft_gate(log_ratio, advantages, a.gate_positive, a.gate_negative)
    elif a.clipping == "tv":
        parts = clipping.total_variation(
            log_ratio, advantages, logprobs, old_logprobs_of(inputs, a), a.clip_low, a.clip_high
        )
    else:
        parts = clipping.clipped(log_ratio, advantages, a.clip_low, a.clip_high, a.dual_clip)
    # A mask makes one ratio per action out of fewer tokens; a token of its own leaves a gap.
    lengths = view.lengths if a.ratio == "sequence" else _all_lengths(inputs, view)
    shares = aggregation.token_shares(a.aggregation, lengths)
    shares = (shares * inputs.action_weights * alive)[index] * inputs.token_weights * view.kept
    return Weighted(parts, log_ratio, shares.detach(), index)


def _gmpo(
    log_ratio: Tensor, inputs: PolicyInputs, view: View, algorithm: AlgorithmConfig
) -> clipping.Surrogate:
    """Clipping happened token by token in the log domain: an action counts as out of range, or as
    clipped, when one of its tokens is."""
    index, z = inputs.action_of_token, view.z.detach()
    advantages = inputs.token_advantages
    out = view.kept & ((z > algorithm.clip_high) | (z < -algorithm.clip_low))
    active = out & (z.sign() * advantages.sign() > 0)
    flags = [action_sums(flag.to(z), index, view.num_actions) > 0 for flag in (out, active)]
    objective = log_ratio.exp() * inputs.advantages.to(log_ratio)
    return clipping.Surrogate(objective, flags[0], flags[1], torch.zeros_like(flags[0]))


def removed_gradient(
    surrogate: Weighted, inputs: PolicyInputs, view: View, algorithm: AlgorithmConfig
) -> Tensor:
    """d(unclipped objective)/d log pi per token where clipping removed it -> [N]."""
    index = inputs.action_of_token
    if algorithm.ratio == "calibrated":
        advantages = inputs.advantages
        per_token = view.kept / view.lengths.clamp(min=1)[index] ** algorithm.alpha
    else:
        advantages = inputs.token_advantages
        per_token = view.kept.to(view.z)
    removed = surrogate.log_ratio.exp() * advantages * surrogate.shares * surrogate.parts.active
    return (removed[index] if algorithm.ratio == "calibrated" else removed) * per_token


def kl_shares(inputs: PolicyInputs, view: View, algorithm: AlgorithmConfig) -> Tensor:
    """Every token of every counted action is held to the reference, dropped or not -> [N]."""
    shares = aggregation.token_shares(algorithm.aggregation, _all_lengths(inputs, view))
    return (shares * inputs.counted)[inputs.action_of_token]


def _all_lengths(inputs: PolicyInputs, view: View) -> Tensor:
    """Tokens of every action, dropped or not -> [K]."""
    ones = torch.ones_like(view.z.detach())
    return action_sums(ones, inputs.action_of_token, view.num_actions)


def old_logprobs_of(inputs: PolicyInputs, algorithm: AlgorithmConfig) -> Tensor:
    """What ratios divide by, in logs -> [N]."""
    return inputs.behaviour_logprobs if algorithm.ratio == "behaviour" else inputs.proximal_logprobs
