"""The policy's loss as a sum over a microbatch, and the sums over the minibatch that it needs.

N tokens, K actions of the part at hand, U ratio units (actions or tokens). Two stages make the
gradient independent of how a minibatch is cut: `minibatch_statistics` of every part are added (and
all-reduced over ranks), then each part's `policy_loss` reads the total, and the caller divides by
`policy_divisor` once.
"""

from typing import NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from capo.configs.algorithms import AlgorithmConfig
from capo.learner import aggregation, clipping, ratios
from capo.learner.behaviour import entropy_normalised_kept
from capo.learner.kl import kl_estimate
from capo.learner.ragged import action_means, action_sums, check_rows, check_tokens


class PolicyInputs(Struct, frozen=True, kw_only=True, eq=False):
    """Everything the policy's loss needs except the current log-probs: frozen for a batch."""

    action_of_token: Tensor  # int64 [N], 0..K-1
    proximal_logprobs: Tensor  # float [N]
    behaviour_logprobs: Tensor  # float [N]
    reference_logprobs: Tensor | None = None  # float [N], None without a KL term
    entropies: Tensor | None = None  # float [N] of the behaviour policy, None unless needed
    advantages: Tensor  # float [K]
    token_advantages: Tensor  # float [N]
    token_weights: Tensor  # float [N]
    token_kept: Tensor  # bool [N]
    action_weights: Tensor  # float [K]
    action_kept: Tensor  # bool [K]
    counted: Tensor  # bool [K]

    def select(self, actions: Tensor) -> "PolicyInputs":
        """The part of these actions (int64, in this order), renumbered from 0; an action's tokens
        keep their order."""
        position = torch.full_like(self.counted, -1, dtype=torch.int64)
        position[actions] = torch.arange(len(actions), device=actions.device)
        owner = position[self.action_of_token]
        tokens = torch.nonzero(owner >= 0).squeeze(1)
        tokens = tokens[owner[tokens].argsort(stable=True)]
        return PolicyInputs(
            action_of_token=owner[tokens],
            proximal_logprobs=self.proximal_logprobs[tokens],
            behaviour_logprobs=self.behaviour_logprobs[tokens],
            reference_logprobs=_pick(self.reference_logprobs, tokens),
            entropies=_pick(self.entropies, tokens),
            advantages=self.advantages[actions],
            token_advantages=self.token_advantages[tokens],
            token_weights=self.token_weights[tokens],
            token_kept=self.token_kept[tokens],
            action_weights=self.action_weights[actions],
            action_kept=self.action_kept[actions],
            counted=self.counted[actions],
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
    log_ratio: Tensor  # float [K], of the action; the token mean for token ratios
    centred_sum: Tensor  # float [K]: sum(z - mu) over kept tokens
    z_sum: Tensor  # float [K]: sum of z over kept tokens
    units: Tensor  # float [K]: ratio units that took part
    out_of_range: Tensor  # float [K], units whose ratio left [1 - clip_low, 1 + clip_high]
    active: Tensor  # float [K], units where clipping removed the gradient
    clamped: Tensor  # float [K], tokens whose log-ratio met the numerical limit


def minibatch_statistics(
    logprobs: Tensor | None, inputs: PolicyInputs, algorithm: AlgorithmConfig
) -> Statistics:
    """Of one part. `logprobs [N]` may be None where `needs_logprob_statistics` is False, and while
    the policy has not moved (z = 0)."""
    with torch.no_grad():
        current = _old_logprobs(inputs, algorithm) if logprobs is None else logprobs.detach()
        view = _view(current, inputs, algorithm)
        lengths = action_sums(torch.ones_like(view.z), inputs.action_of_token, view.num_actions)
        counted = inputs.counted & (lengths > 0)
        removed = torch.zeros((), dtype=torch.float64)
        if algorithm.clip_bias != "none":
            surrogate = _surrogate(current, inputs, view, view.z.new_zeros(()), algorithm)
            removed = _removed_gradient(surrogate, inputs, view, algorithm).double().square().sum()
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
    view = _view(logprobs, inputs, algorithm)
    mu = statistics.mu.to(view.z) if _centred(algorithm) else view.z.new_zeros(())
    surrogate = _surrogate(logprobs, inputs, view, mu, algorithm)
    scale = clip_bias_scale(
        algorithm.clip_bias,
        statistics.removed_squares**0.5 / policy_divisor(statistics, algorithm),
    )
    surrogate_sum = -(surrogate.parts.objective * surrogate.shares).sum() * scale

    kl_sum = view.z.new_zeros(())
    if algorithm.kl_coefficient > 0:
        if inputs.reference_logprobs is None:
            raise ValueError("A KL term needs reference log-probs, got None.")
        kl = kl_estimate(logprobs, inputs.reference_logprobs, algorithm.kl_estimator)
        kl_sum = (kl * _kl_shares(inputs, view, algorithm)).sum()

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
        log_ratio=action_means(surrogate.log_ratio.detach(), index, view.num_actions),
        centred_sum=z_sum - statistics.mu.to(z) * view.lengths,
        z_sum=z_sum,
        units=units,
        out_of_range=action_sums(surrogate.parts.out_of_range * took_part, index, view.num_actions),
        active=action_sums(surrogate.parts.active * took_part, index, view.num_actions),
        clamped=action_sums(view.clamped.to(z), inputs.action_of_token, view.num_actions),
    )


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


class _View(NamedTuple):
    """The part as the current policy sees it."""

    z: Tensor  # [N] with gradient
    clamped: Tensor  # bool [N]
    kept: Tensor  # bool [N], enters ratios and mu
    lengths: Tensor  # [K], kept tokens
    num_actions: int


class _Weighted(NamedTuple):
    """The surrogate by unit, and what each unit counts (weights, masks and aggregation in one)."""

    parts: clipping.Surrogate
    log_ratio: Tensor  # [U]
    shares: Tensor  # [U], detached
    action_of_unit: Tensor  # int64 [U]


def _view(logprobs: Tensor, inputs: PolicyInputs, algorithm: AlgorithmConfig) -> _View:
    num_actions = inputs.advantages.shape[0]
    check_tokens(inputs.action_of_token, logprobs, inputs.token_advantages, inputs.token_kept)
    check_rows(num_actions, "actions", inputs.action_weights, inputs.action_kept, inputs.counted)
    z, clamped = ratios.token_log_ratios(logprobs, _old_logprobs(inputs, algorithm))
    kept = inputs.token_kept & inputs.counted[inputs.action_of_token]
    if algorithm.estr_tau is not None:
        if inputs.entropies is None:
            raise ValueError("estr_tau needs the behaviour policy's entropies, got None.")
        kept = kept & entropy_normalised_kept(
            logprobs, inputs.behaviour_logprobs, inputs.entropies, algorithm.estr_tau
        )
    lengths = action_sums(kept.to(z.dtype), inputs.action_of_token, num_actions)
    return _View(z, clamped, kept, lengths, num_actions)


def _surrogate(
    logprobs: Tensor, inputs: PolicyInputs, view: _View, mu: Tensor, algorithm: AlgorithmConfig
) -> _Weighted:
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
        return _Weighted(parts, log_ratio, shares.detach(), everyone)

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
            log_ratio, advantages, logprobs, _old_logprobs(inputs, a), a.clip_low, a.clip_high
        )
    else:
        parts = clipping.clipped(log_ratio, advantages, a.clip_low, a.clip_high, a.dual_clip)
    shares = aggregation.token_shares(a.aggregation, view.lengths)
    shares = (shares * inputs.action_weights * alive)[index] * inputs.token_weights * view.kept
    return _Weighted(parts, log_ratio, shares.detach(), index)


def _gmpo(
    log_ratio: Tensor, inputs: PolicyInputs, view: _View, algorithm: AlgorithmConfig
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


def _removed_gradient(
    surrogate: _Weighted, inputs: PolicyInputs, view: _View, algorithm: AlgorithmConfig
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


def _kl_shares(inputs: PolicyInputs, view: _View, algorithm: AlgorithmConfig) -> Tensor:
    """Every token of every counted action is held to the reference, dropped or not -> [N]."""
    index = inputs.action_of_token
    lengths = action_sums(torch.ones_like(view.z.detach()), index, view.num_actions)
    shares = aggregation.token_shares(algorithm.aggregation, lengths)
    return (shares * inputs.counted)[index]


def _old_logprobs(inputs: PolicyInputs, algorithm: AlgorithmConfig) -> Tensor:
    return inputs.behaviour_logprobs if algorithm.ratio == "behaviour" else inputs.proximal_logprobs


def _centred(algorithm: AlgorithmConfig) -> bool:
    return algorithm.ratio == "calibrated" and algorithm.centre


def _pick(vector: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if vector is None else vector[rows]
