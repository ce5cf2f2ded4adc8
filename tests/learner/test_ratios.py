"""Log-ratios: their values, their gradients, their limits."""

import math

import pytest
import torch

from capo.learner.ratios import (
    calibrated_log_ratio,
    geometric_log_ratio,
    sequence_log_ratio,
    token_log_ratios,
)
from tests import oracles
from tests.recorded import close, vector

Z = vector([0.01, -0.02, 0.03, 0.004, -0.05])
INDEX = torch.tensor([0, 0, 1, 0, 1])  # tokens of an action need not be neighbours
ROWS = [[0.01, -0.02, 0.004], [0.03, -0.05]]
LENGTHS = vector([3.0, 2.0])


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_alpha_spans_product_to_geometric_mean(alpha: float) -> None:
    found = calibrated_log_ratio(Z, INDEX, LENGTHS, alpha, torch.tensor(0.0))
    expected = [math.log(oracles.calibrated_ratio(row, alpha, 0.0)) for row in ROWS]
    close(found, expected)
    if alpha == 0.0:
        close(found, [sum(row) for row in ROWS])
    if alpha == 1.0:
        close(found, [sum(row) / len(row) for row in ROWS])


def test_centring_cancels_at_alpha_one_and_shifts_at_alpha_zero() -> None:
    mu = torch.tensor(0.007, dtype=torch.float64)
    zero = torch.tensor(0.0)
    mean = calibrated_log_ratio(Z, INDEX, LENGTHS, 1.0, mu)
    close(mean, calibrated_log_ratio(Z, INDEX, LENGTHS, 1.0, zero))
    product = calibrated_log_ratio(Z, INDEX, LENGTHS, 0.0, mu)
    plain = calibrated_log_ratio(Z, INDEX, LENGTHS, 0.0, zero)
    close(product, plain + mu * (1 - LENGTHS))


def test_a_shift_common_to_all_tokens_moves_capos_ratio_by_itself_alone() -> None:
    """Centring takes the shift out before the length's root can multiply it, and puts it back."""
    shift = 0.01
    for length in (1, 4, 100):
        z = torch.full((length,), shift, dtype=torch.float64)
        lengths = vector([float(length)])
        index = torch.zeros(length, dtype=torch.int64)
        centred = calibrated_log_ratio(z, index, lengths, 0.5, z.mean())
        close(centred, [shift])
        direct = calibrated_log_ratio(z, index, lengths, 0.5, torch.tensor(0.0))
        close(direct, [shift * math.sqrt(length)])


def test_no_gradient_flows_through_mu() -> None:
    z = Z.clone().requires_grad_()
    calibrated_log_ratio(z, INDEX, LENGTHS, 0.5, z.mean()).sum().backward()
    assert z.grad is not None
    close(z.grad, (1 / LENGTHS.sqrt())[INDEX])


def test_an_action_without_tokens_has_ratio_one() -> None:
    lengths = vector([3.0, 2.0, 0.0])
    found = calibrated_log_ratio(Z, INDEX, lengths, 0.5, torch.tensor(0.3))
    assert float(found[2]) == 0.0


def test_sequence_ratio_has_the_actions_value_and_the_tokens_gradient() -> None:
    z = Z.clone().requires_grad_()
    found = sequence_log_ratio(z, INDEX, 2)
    means = [sum(row) / len(row) for row in ROWS]
    close(found.detach(), [means[0], means[0], means[1], means[0], means[1]])
    weights = vector([1.0, 2.0, 3.0, 4.0, 5.0])
    (found * weights).sum().backward()
    assert z.grad is not None
    close(z.grad, weights)


def test_sequence_ratio_averages_only_what_is_kept() -> None:
    kept = torch.tensor([True, False, True, True, True])
    found = sequence_log_ratio(Z, INDEX, 2, kept)
    close(found[0], (0.01 + 0.004) / 2)


def test_geometric_ratio_clips_tokens_against_their_advantage_only() -> None:
    z = vector([0.9, -0.9, 0.1])
    index = torch.zeros(3, dtype=torch.int64)
    lengths = vector([3.0])
    up = geometric_log_ratio(z, torch.ones(3, dtype=torch.float64), index, lengths, 0.4, 0.4)
    down = geometric_log_ratio(z, -torch.ones(3, dtype=torch.float64), index, lengths, 0.4, 0.4)
    close(up, [(0.4 - 0.9 + 0.1) / 3])
    close(down, [(0.9 - 0.4 + 0.1) / 3])


def test_token_ratios_beyond_the_limit_are_clamped_counted_and_flat() -> None:
    current = vector([-1.0, -50.0, -1.0]).requires_grad_()
    old = vector([-1.5, -1.0, -80.0])
    z, clamped = token_log_ratios(current, old)
    close(z.detach(), [0.5, -20.0, 20.0])
    assert clamped.tolist() == [False, True, True]
    z.sum().backward()
    assert current.grad is not None
    close(current.grad, [1.0, 0.0, 0.0])


def test_shapes_are_checked_first() -> None:
    with pytest.raises(ValueError, match=r"\(3,\) against \(2,\)"):
        token_log_ratios(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="int64"):
        sequence_log_ratio(Z, INDEX.to(torch.int32), 2)
    with pytest.raises(ValueError, match="for 5 tokens"):
        sequence_log_ratio(Z[:4], INDEX, 2)
