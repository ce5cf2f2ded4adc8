"""Behaviour weights and masks: bounds, vetoes, second moments, and the whole correction."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from capo.configs.algorithms import resolve
from capo.learner import behaviour
from tests import oracles_behaviour
from tests.recorded import close, vector

PROXIMAL = vector([-1.0, -1.0, -1.0, -1.0, -1.0])
SAMPLED = vector([-1.2, -1.4, -1.1, -3.0, -0.9])
INDEX = torch.tensor([0, 0, 1, 1, 2])
LOGS = (PROXIMAL - SAMPLED).tolist()  # .2 .4 | .1 2.0 | -.1


def corrected(**changes: Any) -> behaviour.Correction:
    return behaviour.correct_behaviour(PROXIMAL, SAMPLED, INDEX, 3, resolve(changes))


def test_capo_truncates_the_geometric_mean_at_two() -> None:
    found = corrected()
    close(found.log_weights, [0.3, 1.05, -0.1])
    close(found.action_weights, [math.exp(0.3), 2.0, math.exp(-0.1)])
    assert found.truncated.tolist() == [False, True, False]
    assert found.action_kept.all()
    close(found.token_weights, torch.ones(5))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("prod", [0.6, 2.1, -0.1]), ("sqrt", [0.6 / 2**0.5, 2.1 / 2**0.5, -0.1])],
)
def test_other_aggregations(kind: str, expected: list[float]) -> None:
    found = corrected(behaviour_weight=kind, behaviour_cap=1e9)
    close(found.action_weights.log(), expected)


def test_no_weight_still_measures_the_distance() -> None:
    found = corrected(behaviour_weight="none")
    close(found.action_weights, torch.ones(3))
    close(found.log_weights, [0.3, 1.05, -0.1])


def test_a_mask_drops_what_truncation_bounds() -> None:
    tokens: dict[str, Any] = {"ratio": "token", "behaviour_weight": "token", "behaviour_cap": 2.0}
    truncated = corrected(**tokens)
    close(truncated.token_weights[3], 2.0)
    assert truncated.token_kept.all()
    masked = corrected(**tokens, behaviour_beyond="mask", behaviour_floor=0.95)
    assert masked.token_kept.tolist() == [True, True, True, False, False]
    assert masked.truncated.tolist() == [False, True, True]
    close(masked.token_weights[3], math.exp(2.0))


def test_normalised_weights_have_mean_one() -> None:
    found = corrected(behaviour_normalise=True)
    close(found.action_weights.mean(), 1.0)
    tokens = corrected(ratio="token", behaviour_weight="token", behaviour_normalise=True)
    close(tokens.token_weights.mean(), 1.0)


def test_the_veto_drops_an_action_for_one_impossible_token() -> None:
    sampled = SAMPLED.clone()
    sampled[1] = -1.0 + math.log(1e5)  # the engine found it 1e5 times likelier than the learner
    found = behaviour.correct_behaviour(PROXIMAL, sampled, INDEX, 3, resolve({"veto": 1e-4}))
    assert found.action_kept.tolist() == [False, True, True]
    without = behaviour.correct_behaviour(PROXIMAL, sampled, INDEX, 3, resolve("capo"))
    assert without.action_kept.all()


def test_rejection_and_veto_drop_for_their_own_reasons() -> None:
    """Geometric means 1.6, .9, 1.6 and 1; smallest token ratios 1.6, .3, .3 and 1."""
    ratios = vector([1.6, 1.6, 0.3, 2.7, 0.3, 1.6**2 / 0.3, 1.0, 1.0])
    index = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    options: dict[str, Any] = {"reject": "action_mean_k1", "reject_low": 2 / 3, "reject_high": 1.5}
    sampled = -ratios.log()
    for veto, vetoed in ((0.5, [1, 2]), (0.2, [])):
        found = behaviour.correct_behaviour(
            torch.zeros_like(sampled), sampled, index, 4, resolve({**options, "veto": veto})
        )
        assert found.token_kept.tolist() == [False, False, True, True, False, False, True, True]
        assert torch.nonzero(~found.action_kept)[:, 0].tolist() == vetoed


def test_entropy_normalised_mask_is_stricter_where_the_policy_was_sure() -> None:
    gap = 0.1
    entropies = vector([0.0, 0.1, 1.0])
    kept = behaviour.entropy_normalised_kept(
        torch.zeros(3, dtype=torch.float64), torch.full((3,), gap), entropies, tau=0.05
    )
    assert kept.tolist() == [False, False, True]


def test_an_infinite_or_undefined_log_prob_becomes_a_finite_weight() -> None:
    sampled = vector([-math.inf, math.nan, -1.0, -1.0, -1.0])
    found = behaviour.correct_behaviour(PROXIMAL, sampled, INDEX, 3, resolve("capo"))
    assert bool(found.action_weights.isfinite().all())
    assert bool(found.log_weights.isfinite().all())


@given(
    logs=st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=20),
    threshold=st.sampled_from([0.001, 0.04, 0.2, 10.0]),
)
@settings(max_examples=80, deadline=None)
def test_second_moment_mask_keeps_the_most_it_may(logs: list[float], threshold: float) -> None:
    values = vector(logs)
    kept = behaviour.second_moment_kept(values, threshold)
    assert int(kept.sum()) == oracles_behaviour.second_moment_kept(logs, threshold)
    if not kept.all():
        assert float(values[kept].square().max()) <= float(values[~kept].square().min())


@pytest.mark.parametrize("scope", ["token", "action_sum", "action_mean", "action_max"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_rejection_by_divergence(scope: str, estimator: str) -> None:
    if (scope, estimator) == ("action_max", "k1"):
        return
    divergences = {
        "k1": [-one for one in LOGS],
        "k2": [one * one / 2 for one in LOGS],
        "k3": [math.exp(one) - 1 - one for one in LOGS],
    }[estimator]
    rows = [divergences[:2], divergences[2:4], divergences[4:]]
    reduce = {"action_sum": sum, "action_mean": lambda row: sum(row) / len(row), "action_max": max}
    if scope == "token":
        per_token = divergences
    else:
        per_token = [reduce[scope](row) for row in rows for _ in row]  # type: ignore[operator]
    low, high = 0.5, 2.0
    expected = [
        math.log(low) <= one <= math.log(high) if estimator == "k1" else one <= high
        for one in per_token
    ]
    found = behaviour.rejection_kept(
        PROXIMAL - SAMPLED, INDEX, 3, f"{scope}_{estimator}", low, high
    )
    assert found.tolist() == expected


def test_everything_is_detached() -> None:
    proximal = PROXIMAL.clone().requires_grad_()
    found = behaviour.correct_behaviour(proximal, SAMPLED, INDEX, 3, resolve("capo"))
    assert not found.action_weights.requires_grad
    assert not found.log_weights.requires_grad
