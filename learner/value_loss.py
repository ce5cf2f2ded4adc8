"""The critic's loss: squared error to the returns, optionally clipped around the old values."""

from msgspec import Struct
from torch import Tensor


class ValueLoss(Struct, frozen=True, kw_only=True, eq=False):
    loss_sum: Tensor  # scalar with gradient
    clipped_sum: Tensor  # scalar, detached: readings where the clipped error was the larger


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> ValueLoss:
    """All `[V]` readings (boundaries or tokens). The caller divides by the global number of them."""
    raise NotImplementedError
