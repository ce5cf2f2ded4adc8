"""How far the policy that sampled an action is from the proximal one, as weights and masks.

N tokens, K actions. All of it is detached and frozen before the first optimizer step of a batch.
Log-ratios here are log proximal - log behaviour of a token.
"""

import math

import torch
from msgspec import Struct
from torch import Tensor

from capo.configs.algorithms import AlgorithmConfig
from capo.learner.ragged import action_maxima, action_means, action_sums, check_tokens

LOG_WEIGHT_LIMIT = 20.0


class Correction(Struct, frozen=True, kw_only=True, eq=False):
    """Weights multiply the objective after clipping. What is not kept contributes nothing to it but
    stays in the divisor."""

    token_weights: Tensor  # float [N], 1 where the weight is per action
    token_kept: Tensor  # bool [N]
    action_weights: Tensor  # float [K], 1 where the weight is per token
    action_kept: Tensor  # bool [K]
    log_weights: Tensor  # float [K], log(proximal / behaviour) per action, before any truncation
    truncated: Tensor  # bool [K]: the action, or one of its tokens, left [floor, cap]


def correct_behaviour(
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    action_of_token: Tensor,
    num_actions: int,
    algorithm: AlgorithmConfig,
) -> Correction:
    """The whole batch at once: `*_logprobs [N]`, `action_of_token int64 [N]`."""
    check_tokens(action_of_token, proximal_logprobs, behaviour_logprobs)
    a = algorithm
    log_ratios = token_log_weights(proximal_logprobs, behaviour_logprobs)
    kind = a.behaviour_weight if a.behaviour_weight in ("geo", "prod", "sqrt") else "geo"
    log_weights = action_log_weights(log_ratios, action_of_token, num_actions, kind)

    token_weights = torch.ones_like(log_ratios)
    token_kept = torch.ones_like(log_ratios, dtype=torch.bool)
    action_weights = torch.ones_like(log_weights)
    action_kept = torch.ones_like(log_weights, dtype=torch.bool)
    truncated = torch.zeros_like(action_kept)
    if a.behaviour_weight == "token":
        token_weights, token_kept, beyond = bounded_weights(
            log_ratios, a.behaviour_cap, a.behaviour_floor, a.behaviour_beyond
        )
        truncated = _any(beyond, action_of_token, num_actions)
        if a.behaviour_normalise:
            token_weights = normalised(token_weights, token_kept)
    elif a.behaviour_weight != "none":
        action_weights, action_kept, truncated = bounded_weights(
            log_weights, a.behaviour_cap, a.behaviour_floor, a.behaviour_beyond
        )
        if a.behaviour_normalise:
            action_weights = normalised(action_weights, action_kept)

    if a.reject != "none":
        token_kept = token_kept & rejection_kept(
            log_ratios, action_of_token, num_actions, a.reject, a.reject_low, a.reject_high
        )
    if a.m2_threshold is not None:
        token_kept = token_kept & second_moment_kept(log_ratios, a.m2_threshold)
    if a.veto is not None:
        catastrophic = log_ratios < math.log(a.veto)
        action_kept = action_kept & ~_any(catastrophic, action_of_token, num_actions)
    return Correction(
        token_weights=token_weights,
        token_kept=token_kept,
        action_weights=action_weights,
        action_kept=action_kept,
        log_weights=log_weights,
        truncated=truncated,
    )


def token_log_weights(proximal_logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """log proximal - log behaviour -> [N], detached. An engine's -inf counts as the limit."""
    raw = proximal_logprobs.detach() - behaviour_logprobs.detach()
    return raw.nan_to_num(0.0, posinf=LOG_WEIGHT_LIMIT, neginf=-LOG_WEIGHT_LIMIT)


def action_log_weights(
    log_ratios: Tensor, action_of_token: Tensor, num_actions: int, kind: str
) -> Tensor:
    """Per action -> [K]: "prod" the sum of its tokens, "geo" their mean, "sqrt" sum / sqrt(L)."""
    if kind == "geo":
        return action_means(log_ratios, action_of_token, num_actions)
    sums = action_sums(log_ratios, action_of_token, num_actions)
    if kind == "prod":
        return sums
    if kind != "sqrt":
        raise ValueError(f"Unknown weight {kind!r}; known are geo, prod, sqrt.")
    lengths = action_sums(torch.ones_like(log_ratios), action_of_token, num_actions)
    return sums / lengths.clamp(min=1).sqrt()


def bounded_weights(
    log_weights: Tensor, cap: float, floor: float | None, beyond: str
) -> tuple[Tensor, Tensor, Tensor]:
    """exp of U log-weights, its treatment outside [floor, cap]: (weights, kept bool, beyond bool).

    "truncate" moves a weight to the nearer bound (TIS), "mask" leaves it and drops its unit
    (IcePop, masked importance sampling).
    """
    weights = log_weights.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()
    outside = weights > cap
    if floor is not None:
        outside = outside | (weights < floor)
    if beyond == "mask":
        return weights, ~outside, outside
    bounded = weights.clamp(min=floor, max=cap)
    return bounded, torch.ones_like(outside), outside


def normalised(weights: Tensor, kept: Tensor) -> Tensor:
    """Weights divided by their mean over all units, dropped units counting 0."""
    mean = (weights * kept).sum() / max(weights.numel(), 1)
    return weights / mean if mean > 0 else weights


def second_moment_kept(log_ratios: Tensor, threshold: float) -> Tensor:
    """M2PO (arXiv 2510.01161): drop the tokens with the largest squared log-ratio until the mean
    square of the rest is below `threshold`; at least one token stays. bool [N]."""
    squares = log_ratios.square()
    if squares.numel() == 0:
        return torch.ones_like(squares, dtype=torch.bool)
    ascending, order = squares.sort(stable=True)
    counts = torch.arange(1, squares.numel() + 1, dtype=squares.dtype, device=squares.device)
    below = ascending.cumsum(0) / counts < threshold  # means of growing prefixes never fall
    num_kept = max(int(below.sum()), 1)
    kept = torch.zeros_like(squares, dtype=torch.bool)
    kept[order[:num_kept]] = True
    return kept


def rejection_kept(
    log_ratios: Tensor,
    action_of_token: Tensor,
    num_actions: int,
    rule: str,
    low: float,
    high: float,
) -> Tensor:
    """Tokens whose divergence estimate lies within bounds; bool [N].

    `rule` is SCOPE_ESTIMATOR: scope "token", or "action_sum", "action_mean", "action_max" (then an
    action is kept or dropped whole); estimator k1 = -log r within [log low, log high], k2 or k3 at
    most `high`, with r = proximal / behaviour.
    """
    scope, _, estimator = rule.rpartition("_")
    x = log_ratios.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
    if estimator == "k1":
        divergence = -x
    elif estimator == "k2":
        divergence = 0.5 * x.square()
    elif estimator == "k3":
        divergence = x.exp() - 1.0 - x
    else:
        raise ValueError(f"Unknown rejection rule {rule!r}.")
    if scope != "token":
        reduce = {"action_sum": action_sums, "action_mean": action_means}.get(scope, action_maxima)
        divergence = reduce(divergence, action_of_token, num_actions)
    if estimator == "k1":
        kept = (divergence >= math.log(low)) & (divergence <= math.log(high))
    else:
        kept = divergence <= high
    return kept if scope == "token" else kept[action_of_token]


def entropy_normalised_kept(
    logprobs: Tensor, behaviour_logprobs: Tensor, entropies: Tensor, tau: float
) -> Tensor:
    """ESTR (arXiv 2607.22186): keep a token iff (log pi - log behaviour)^2 / (H + 1e-6) <= tau,
    with H the behaviour policy's entropy there. All [N]; bool [N]."""
    squares = (logprobs.detach() - behaviour_logprobs).square()
    return squares / (entropies + 1e-6) <= tau


def _any(flags: Tensor, action_of_token: Tensor, num_actions: int) -> Tensor:
    return action_sums(flags.to(torch.float32), action_of_token, num_actions) > 0
