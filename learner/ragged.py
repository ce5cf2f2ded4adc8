"""Reductions over ragged actions: N tokens, each with the number of one of K actions.

Tokens of an action need not be neighbours. An action without tokens sums to 0.
"""

import torch
from torch import Tensor


def action_sums(values: Tensor, action_of_token: Tensor, num_actions: int) -> Tensor:
    """Sum `values [N]` per action -> [K]; differentiable."""
    check_tokens(action_of_token, values)
    return values.new_zeros(num_actions).index_add(0, action_of_token, values)


def action_means(values: Tensor, action_of_token: Tensor, num_actions: int) -> Tensor:
    """Mean of `values [N]` per action -> [K]; 0 for an action without tokens."""
    sums = action_sums(values, action_of_token, num_actions)
    counts = action_sums(torch.ones_like(values), action_of_token, num_actions)
    return sums / counts.clamp(min=1)


def action_maxima(values: Tensor, action_of_token: Tensor, num_actions: int) -> Tensor:
    """Largest of `values [N]` per action -> [K]; 0 for an action without tokens."""
    check_tokens(action_of_token, values)
    start = values.new_full((num_actions,), -torch.inf)
    found = start.scatter_reduce(0, action_of_token, values, "amax")
    return torch.where(found.isneginf(), 0.0, found)


def check_tokens(action_of_token: Tensor, *vectors: Tensor) -> None:
    """All `[N]` like the index, or a ValueError with both shapes."""
    if action_of_token.ndim != 1 or action_of_token.dtype != torch.int64:
        raise ValueError(
            f"action_of_token must be int64 of rank 1, got {action_of_token.dtype} of rank"
            f" {action_of_token.ndim}."
        )
    for vector in vectors:
        if vector.shape != action_of_token.shape:
            raise ValueError(
                f"A vector of shape {tuple(vector.shape)} for {action_of_token.shape[0]} tokens."
            )


def check_rows(count: int, name: str, *vectors: Tensor) -> None:
    """All of shape `[count]`, or a ValueError with both numbers. `name` is the plural of a row."""
    for vector in vectors:
        if vector.shape != (count,):
            raise ValueError(f"A vector of shape {tuple(vector.shape)} for {count} {name}.")
