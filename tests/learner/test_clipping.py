"""Clipping: value, gradient, and what it says about range and activity."""

import math

import pytest
import torch

from capo.learner import clipping
from tests.recorded import close, vector

#   ratio    A      unclipped gradient survives
TABLE = [
    (1.05, 1.0, True),
    (1.05, -1.0, True),
    (1.30, 1.0, False),
    (1.30, -1.0, True),
    (0.70, 1.0, True),
    (0.70, -1.0, False),
    (0.70, 0.0, True),
]


@pytest.mark.parametrize(("ratio", "advantage", "survives"), TABLE)
def test_the_pessimistic_side_is_taken(ratio: float, advantage: float, survives: bool) -> None:
    log_ratio = vector([math.log(ratio)]).requires_grad_()
    found = clipping.clipped(log_ratio, vector([advantage]), 0.2, 0.2)
    found.objective.sum().backward()
    bounded = min(max(ratio, 0.8), 1.2)
    close(found.objective.detach(), [min(ratio * advantage, bounded * advantage)])
    assert log_ratio.grad is not None
    close(log_ratio.grad, [ratio * advantage if survives else 0.0])
    assert bool(found.active[0]) is not survives
    assert bool(found.out_of_range[0]) is not (0.8 <= ratio <= 1.2)


def test_sides_may_differ() -> None:
    log_ratio = vector([1.25, 1.30, 0.85, 0.75]).log()
    found = clipping.clipped(log_ratio, vector([1.0, 1.0, -1.0, -1.0]), 0.2, 0.28)
    assert found.active.tolist() == [False, True, False, True]


def test_the_boundary_itself_is_inside() -> None:
    found = clipping.clipped(vector([0.0]), vector([1.0]), 0.0, 0.0)
    assert not found.out_of_range[0]
    assert not found.active[0]


def test_dual_clip_bounds_only_negative_advantages() -> None:
    log_ratio = vector([10.0, 10.0, 2.9]).log().requires_grad_()
    advantages = vector([-1.0, 1.0, -1.0])
    found = clipping.clipped(log_ratio, advantages, 0.2, 0.2, dual_clip=3.0)
    close(found.objective.detach(), [-3.0, 1.2, -2.9])
    assert found.dual.tolist() == [True, False, False]
    found.objective.sum().backward()
    assert log_ratio.grad is not None
    close(log_ratio.grad, [0.0, 0.0, -2.9])


def test_cispo_never_removes_a_gradient() -> None:
    logprobs = vector([-1.0, -2.0]).requires_grad_()
    found = clipping.cispo(vector([5.0, 0.1]).log(), vector([1.0, -1.0]), logprobs, 1.0, 0.2)
    found.objective.sum().backward()
    assert logprobs.grad is not None
    close(logprobs.grad, [1.2, -0.1])
    assert not found.active.any()


def test_the_band_is_blind_to_the_advantages_sign() -> None:
    log_ratio = vector([1.3, 1.3, 0.7, 0.7, 1.1]).log().requires_grad_()
    advantages = vector([1.0, -1.0, 1.0, -1.0, 1.0])
    found = clipping.band(log_ratio, advantages, 0.2, 0.28)
    found.objective.sum().backward()
    assert log_ratio.grad is not None
    close(log_ratio.grad, [0.0, 0.0, 0.0, 0.0, 1.1])
    assert found.active.tolist() == [True, True, True, True, False]


def test_the_soft_gate_has_ppos_slope_at_one() -> None:
    log_ratio = vector([0.0, 0.0]).requires_grad_()
    found = clipping.soft_gate(log_ratio, vector([2.0, -2.0]), 1.0, 1.05)
    found.objective.sum().backward()
    assert log_ratio.grad is not None
    close(log_ratio.grad, [2.0, -2.0])


def test_total_variation_measures_probability_not_ratio() -> None:
    """A rare token may triple its ratio; a likely one may not move by 0.2."""
    old = vector([0.01, 0.5, 0.9]).log()
    current = vector([0.03, 0.8, 0.6]).log().requires_grad_()
    advantages = vector([1.0, 1.0, -1.0])
    found = clipping.total_variation((current - old).detach(), advantages, current, old, 0.15, 0.15)
    assert found.active.tolist() == [False, True, True]
    found.objective.sum().backward()
    assert current.grad is not None
    close(current.grad, [3.0, 0.0, 0.0])


def test_shapes_are_checked_first() -> None:
    with pytest.raises(ValueError, match=r"\(2,\) for advantages of shape \(3,\)"):
        clipping.clipped(torch.zeros(2), torch.zeros(3), 0.1, 0.1)
