"""The policy's loss as a sum over a microbatch, and the sums over the minibatch that it needs.

N tokens, K actions of the part at hand. Two stages make the gradient independent of how a minibatch
is cut: `minibatch_statistics` of every part are added (and all-reduced over ranks), then each
part's `policy_loss` reads the total, and the caller divides by `policy_divisor` once.
"""

import torch
from msgspec import Struct
from torch import Tensor

from capo.configs.algorithms import AlgorithmConfig, is_centred
from capo.learner import aggregation
from capo.learner.kl import kl_estimate
from capo.learner.policy_inputs import PolicyInputs
from capo.learner.ragged import action_means, action_sums
from capo.learner.surrogate import (
    kl_shares,
    removed_gradient,
    view_of,
    weighted_surrogate,
)


class Statistics(Struct, frozen=True, eq=False):
    """Sums over a minibatch. Parts add; all-reduce `sums` over ranks."""

    sums: Tensor  # float64 [5]: see the properties

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(self.sums + other.sums)

    @property
    def mu(self) -> Tensor:
        """Token-weighted mean of z over kept tokens of counted actions; scalar."""
        return self.sums[0] / self.sums[1].clamp(min=1)

    @property
    def num_tokens(self) -> float:
        """Tokens of counted actions, kept or not."""
        return float(self.sums[2])

    @property
    def num_actions(self) -> float:
        """Counted actions that have tokens."""
        return float(self.sums[3])

    @property
    def removed_squares(self) -> float:
        """Sum over tokens of the squared gradient that clipping removed, before the divisor."""
        return float(self.sums[4])


class PolicyLoss(Struct, frozen=True, kw_only=True, eq=False):
    """`loss_sum` carries the gradient (an empty part gives a zero that does, too). The rest are
    detached; per action, and over ratio units, so that fractions are sums over `units`."""

    loss_sum: Tensor  # scalar; surrogate + coefficient * KL
    surrogate_sum: Tensor  # scalar, detached
    kl_sum: Tensor  # scalar, detached, before the coefficient
    log_ratio: Tensor  # float [K], of the action; for token ratios the mean of those that took part
    z_sum: Tensor  # float [K]: sum of z over kept tokens
    kept_tokens: Tensor  # float [K]: how many these are; 0 for an action that is not counted
    units: Tensor  # float [K]: ratio units that took part
    out_of_range: Tensor  # float [K], units whose ratio left [1 - clip_low, 1 + clip_high]
    active: Tensor  # float [K], units where clipping removed the gradient
    clamped: Tensor  # float [K], tokens whose log-ratio met the numerical limit


def minibatch_statistics(
    logprobs: Tensor | None, inputs: PolicyInputs, algorithm: AlgorithmConfig
) -> Statistics:
    """Of one part. `logprobs [N]` may be None where `needs_logprob_statistics` is False, and while
    the policy has not moved: then it is the proximal policy still."""
    with torch.no_grad():
        current = inputs.proximal_logprobs if logprobs is None else logprobs.detach()
        view = view_of(current, inputs, algorithm)
        lengths = action_sums(torch.ones_like(view.z), inputs.action_of_token, view.num_actions)
        counted = inputs.counted & (lengths > 0)
        removed = view.z.new_zeros((), dtype=torch.float64)
        if algorithm.clip_bias != "none":
            surrogate = weighted_surrogate(current, inputs, view, view.z.new_zeros(()), algorithm)
            removed = removed_gradient(surrogate, inputs, view, algorithm).double().square().sum()
        sums = [
            (view.z * view.kept).sum(dtype=torch.float64),
            view.kept.sum(),
            (lengths * counted).sum(),
            counted.sum(),
            removed,
        ]
        return Statistics(torch.stack([value.to(torch.float64) for value in sums]))


def policy_loss(
    logprobs: Tensor, inputs: PolicyInputs, statistics: Statistics, algorithm: AlgorithmConfig
) -> PolicyLoss:
    """`logprobs [N]` of the current policy with gradient; `statistics` of the whole minibatch."""
    view = view_of(logprobs, inputs, algorithm)
    mu = statistics.mu.to(view.z) if is_centred(algorithm) else view.z.new_zeros(())
    surrogate = weighted_surrogate(logprobs, inputs, view, mu, algorithm)
    scale = clip_bias_scale(
        algorithm.clip_bias,
        statistics.removed_squares**0.5 / policy_divisor(statistics, algorithm),
    )
    surrogate_sum = -surrogate.total() * scale

    kl_sum = view.z.new_zeros(())
    if algorithm.kl_coefficient > 0:
        if inputs.reference_logprobs is None:
            raise ValueError("A KL term needs reference log-probs, got None.")
        kl = kl_estimate(logprobs, inputs.reference_logprobs, algorithm.kl_estimator)
        kl_sum = (kl * kl_shares(inputs, view, algorithm)).sum()

    index = surrogate.action_of_unit
    took_part = (surrogate.shares > 0).to(view.z)
    units = action_sums(took_part, index, view.num_actions)
    z = view.z.detach()
    kept = view.kept.to(z)
    z_sum = action_sums(z * kept, inputs.action_of_token, view.num_actions)
    return PolicyLoss(
        loss_sum=surrogate_sum + algorithm.kl_coefficient * kl_sum,
        surrogate_sum=surrogate_sum.detach(),
        kl_sum=kl_sum.detach(),
        log_ratio=_log_ratios(surrogate.log_ratio.detach(), took_part, index, view.num_actions),
        z_sum=z_sum,
        kept_tokens=view.lengths.detach(),
        units=units,
        out_of_range=action_sums(surrogate.parts.out_of_range * took_part, index, view.num_actions),
        active=action_sums(surrogate.parts.active * took_part, index, view.num_actions),
        clamped=action_sums(view.clamped.to(z), inputs.action_of_token, view.num_actions),
    )


def _log_ratios(log_ratio: Tensor, took_part: Tensor, index: Tensor, num_actions: int) -> Tensor:
    """Mean of U log-ratios per action -> [K]: over the units that took part, or over all of them
    where none did, so that a dropped action still says how far it was off."""
    units = action_sums(took_part, index, num_actions)
    means = action_sums(log_ratio * took_part, index, num_actions) / units.clamp(min=1)
    return torch.where(units > 0, means, action_means(log_ratio, index, num_actions))


def policy_divisor(statistics: Statistics, algorithm: AlgorithmConfig) -> float:
    """By what the sum over all parts and ranks of `loss_sum` is divided; at least 1."""
    return aggregation.divisor(
        algorithm.aggregation,
        statistics.num_tokens,
        statistics.num_actions,
        algorithm.length_norm,
    )


def clip_bias_scale(form: str, norm: float) -> float:
    """By what the surrogate is multiplied, from the size of the gradient that clipping removed.

    The exact form of ST-PPO's normalisation is unconfirmed (arXiv 2511.20718); these are readings.
    """
    if form == "none":
        return 1.0
    if form == "max_one":
        return 1.0 / max(1.0, norm)
    if form == "one_plus":
        return 1.0 / (1.0 + norm)
    if form == "norm":
        return 1.0 / max(norm, 1e-8)
    raise ValueError(f"Unknown clip bias {form!r}; known are none, max_one, one_plus, norm.")
