"""The critic's loss: squared error to the returns, optionally clipped around the old values."""

import torch
from msgspec import Struct
from torch import Tensor

from capo.learner.ragged import check_rows


class ValueLoss(Struct, frozen=True, kw_only=True, eq=False):
    """Sums over readings; the caller divides."""

    loss_sum: Tensor  # scalar with gradient
    clipped_sum: Tensor  # scalar, detached: readings where the clipped error was the larger


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = None
) -> ValueLoss:
    """Half the squared error of V readings, summed (PPO's value loss; Schulman et al. 2017).

    With `clip` the larger of the errors of `values` and of `values` kept within +-clip of
    `old_values`. The caller divides by the global number of readings.

    Args: values [V] with gradient, at boundaries or tokens; old_values [V]; returns [V].
    """
    check_rows(values.shape[0], "values", values, old_values, returns)
    errors = value_errors(values, old_values, returns, clip)
    plain = (values.detach() - returns).square() * 0.5
    return ValueLoss(loss_sum=errors.sum(), clipped_sum=(errors.detach() > plain).sum())


def value_errors(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """The same per reading -> [V], with gradient."""
    returns = returns.detach()
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain
    old = old_values.detach()
    bounded = torch.maximum(torch.minimum(values, old + clip), old - clip)
    return 0.5 * torch.maximum(plain, (bounded - returns).square())
