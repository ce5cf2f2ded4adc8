"""How losses of units become one number: what each unit counts, and what the sum is divided by.

U units (tokens or actions), K actions. Sums of parts add up; the divisor is global.
"""

import torch
from torch import Tensor


def token_shares(aggregation: str, lengths: Tensor, epsilon: float = 0.0) -> Tensor:
    """What one token of each action counts -> [K].

    Args:
        aggregation: "action_mean" (mean over an action's tokens, then over actions; elsewhere
            seq-mean-token-mean), "token_mean", "action_sum" (seq-mean-token-sum) or
            "action_sum_norm" (the same over a constant length, Dr. GRPO).
        lengths: [K] tokens per action.
        epsilon: added to lengths (1e-8 in some public code).
    """
    if aggregation == "action_mean":
        return 1.0 / (lengths.clamp(min=1) + epsilon)
    _check(aggregation)
    return torch.ones_like(lengths)


def action_shares(aggregation: str, lengths: Tensor) -> Tensor:
    """What an action counts whose loss is one number -> [K]: 1, or its length where tokens count
    equally."""
    if aggregation == "action_mean":
        return torch.ones_like(lengths)
    _check(aggregation)
    return lengths


def divisor(aggregation: str, num_tokens: float, num_actions: float, length_norm: float) -> float:
    """By what the sum over the whole minibatch is divided; at least 1."""
    if aggregation == "token_mean":
        return max(num_tokens, 1.0)
    if aggregation == "action_sum_norm":
        return max(num_actions, 1.0) * length_norm
    _check(aggregation)
    return max(num_actions, 1.0)


def _check(aggregation: str) -> None:
    known = ("action_mean", "token_mean", "action_sum", "action_sum_norm")
    if aggregation not in known:
        raise ValueError(f"Unknown aggregation {aggregation!r}; known are {', '.join(known)}.")
