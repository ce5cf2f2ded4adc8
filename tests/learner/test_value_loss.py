"""The critic's loss, clipped and not."""

import pytest
import torch

from capo.learner.value_loss import value_loss
from tests.recorded import close, vector


def test_without_clip_it_is_half_the_squared_error_summed() -> None:
    values = vector([1.0, 2.0]).requires_grad_()
    found = value_loss(values, vector([0.0, 0.0]), vector([0.0, 4.0]))
    close(found.loss_sum.detach(), 0.5 * (1.0 + 4.0))
    found.loss_sum.backward()
    assert values.grad is not None
    close(values.grad, [1.0, -2.0])
    assert int(found.clipped_sum) == 0


def test_the_clip_takes_the_larger_error_and_stops_its_gradient() -> None:
    """A value that ran 1.0 towards its return from 0, where 0.2 was allowed, gets no gradient."""
    values = vector([1.0, 0.1, -1.0]).requires_grad_()
    found = value_loss(values, torch.zeros(3, dtype=torch.float64), vector([2.0, 2.0, 2.0]), 0.2)
    close(found.loss_sum.detach(), 0.5 * (1.8**2 + 1.9**2 + 3.0**2))
    found.loss_sum.backward()
    assert values.grad is not None
    close(values.grad, [0.0, -1.9, -3.0])
    assert int(found.clipped_sum) == 1


def test_parts_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 9, generator=generator, dtype=torch.float64)
    whole = value_loss(values, old, returns, 0.3)
    parts = [
        value_loss(values[rows], old[rows], returns[rows], 0.3) for rows in torch.arange(9).split(4)
    ]
    close(sum(part.loss_sum for part in parts), whole.loss_sum)
    assert sum(int(part.clipped_sum) for part in parts) == int(whole.clipped_sum)


def test_returns_get_no_gradient() -> None:
    returns = vector([1.0]).requires_grad_()
    assert not value_loss(vector([0.0]), vector([0.0]), returns).loss_sum.requires_grad


def test_an_empty_part_is_a_zero_with_gradient() -> None:
    values = torch.zeros(0, requires_grad=True)
    value_loss(values, torch.zeros(0), torch.zeros(0), 0.2).loss_sum.backward()


def test_shapes_are_checked_first() -> None:
    with pytest.raises(ValueError, match=r"\(2,\) for 3 values"):
        value_loss(torch.zeros(3), torch.zeros(3), torch.zeros(2))
