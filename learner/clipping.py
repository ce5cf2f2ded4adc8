"""From ratios and advantages to the surrogate objective, unit by unit.

U units, each an action or a token. Everything is to be maximised; signs, weights and averages come
later.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Surrogate(NamedTuple):
    objective: Tensor  # [U] with gradient
    out_of_range: Tensor  # bool [U], the ratio left the interval
    active: Tensor  # bool [U], the clipping removed the gradient
    dual: Tensor  # bool [U], of those, by the dual clip


def clipped(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """min(w A, clip(w, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347 eq. 7; CAPO eq. 5).

    With `dual_clip` c the objective of a negative advantage is at least c A (arXiv 1912.09729).

    Args: log_ratio, advantages [U].
    """
    ratio, out = _ratio(log_ratio, advantages, clip_low, clip_high)
    unclipped = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    active = bounded < unclipped
    objective = torch.where(active, bounded.detach(), unclipped)
    dual = torch.zeros_like(active)
    if dual_clip is not None:
        floor = dual_clip * advantages
        dual = (advantages < 0) & (objective < floor)
        objective = torch.where(dual, floor, objective)
    return Surrogate(objective, out, active | dual, dual)


def cispo(
    log_ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """sg(clip(w)) A log pi: the weight is clipped, the gradient never removed (CISPO, arXiv
    2506.13585 eq. 4)."""
    ratio, out = _ratio(log_ratio, advantages, clip_low, clip_high)
    weight = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    nothing = torch.zeros_like(out)
    return Surrogate(weight * advantages * logprobs, out, nothing, nothing)


def band(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Surrogate:
    """w A inside the open interval, nothing outside, whatever the sign of A: the double-sided mask
    of SAO (arXiv 2607.07508)."""
    ratio, _ = _ratio(log_ratio, advantages, clip_low, clip_high)
    outside = (ratio <= 1.0 - clip_low) | (ratio >= 1.0 + clip_high)
    objective = torch.where(outside, 0.0, ratio * advantages)
    return Surrogate(objective, outside, outside, torch.zeros_like(outside))


def soft_gate(
    log_ratio: Tensor, advantages: Tensor, temperature_positive: float, temperature_negative: float
) -> Surrogate:
    """(4 / tau) sigmoid(tau (w - 1)) A with tau by the sign of A (arXiv 2511.20347 eq. 5)."""
    ratio, out = _ratio(log_ratio, advantages, 0.0, 0.0)
    tau = torch.full_like(advantages, temperature_negative)
    tau[advantages > 0] = temperature_positive
    nothing = torch.zeros_like(out)
    objective = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau) * advantages
    return Surrogate(objective, out, nothing, nothing)


def total_variation(
    log_ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    clip_low: float,
    clip_high: float,
    ratio_cap: float = 20.0,
) -> Surrogate:
    """sg(min(w, cap)) A log pi where the token's probability moved by at most `clip_high` towards a
    positive advantage or `clip_low` towards a negative one (DPPO-TV, arXiv 2602.04879)."""
    ratio, _ = _ratio(log_ratio, advantages, clip_low, clip_high)
    moved = logprobs.detach().exp() - old_logprobs.exp()
    outside = torch.where(advantages > 0, moved > clip_high, moved < -clip_low)
    weight = ratio.detach().clamp(max=ratio_cap)
    objective = torch.where(outside, 0.0, weight * advantages * logprobs)
    return Surrogate(objective, outside, outside, torch.zeros_like(outside))


def _ratio(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    if log_ratio.shape != advantages.shape or log_ratio.ndim != 1:
        raise ValueError(
            f"Log-ratios of shape {tuple(log_ratio.shape)} for advantages of shape"
            f" {tuple(advantages.shape)}; both must be [U]."
        )
    ratio = log_ratio.exp()
    constant = ratio.detach()
    return ratio, (constant < 1.0 - clip_low) | (constant > 1.0 + clip_high)
