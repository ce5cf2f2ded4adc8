"""Masks, vetoes and bounds against slow definitions, where they drop some and keep some.

Most recordings (cases 11-13) keep every token. Here are their log-probs under bounds inside their
range.
"""

import math
from statistics import mean
from typing import Any, get_args, get_type_hints

import pytest
import torch

from capo.configs.algorithms import AlgorithmConfig, resolve
from capo.learner import behaviour
from tests import oracles_behaviour
from tests.recorded import cases, close, vector

RULES = [rule for rule in get_args(get_type_hints(AlgorithmConfig)["reject"]) if rule != "none"]


class Recorded:
    """Only the log-probs of a recorded case, per action."""

    def __init__(self, proximal: list[list[float]], sampled: list[list[float]], mask: Any) -> None:
        spoken = [
            [(one, other) for one, other, on in zip(*row, strict=True) if on > 0]
            for row in zip(proximal, sampled, mask, strict=True)
        ]
        self.pairs = [row for row in spoken if row]
        self.log_ratios = [[one - other for one, other in row] for row in self.pairs]
        lengths = torch.tensor([len(row) for row in self.pairs])
        self.index = torch.arange(len(self.pairs)).repeat_interleave(lengths)

    def corrected(self, **changes: Any) -> behaviour.Correction:
        tokens = [pair for row in self.pairs for pair in row]
        return behaviour.correct_behaviour(
            vector([one for one, _ in tokens]),
            vector([other for _, other in tokens]),
            self.index,
            len(self.pairs),
            resolve(changes),
        )


def _recorded(number: str, proximal: str, sampled: str, mask: str) -> list[Any]:
    return [
        case
        if case.values[0] is None
        else pytest.param(
            Recorded(*(case.values[0]["inputs"][name] for name in (proximal, sampled, mask))),
            id=case.id,
        )
        for case in cases(number)
    ]


RECORDED = [
    *_recorded("11", "proximal_log_prob", "rollout_log_prob", "response_mask"),
    *_recorded("12", "proximal_log_prob", "behave_log_prob", "mask"),
    *_recorded("13", "train_log_probs", "rollout_log_probs", "loss_masks"),
]


@pytest.mark.parametrize("case", RECORDED)
@pytest.mark.parametrize("rule", RULES)
def test_rejection_between_the_recorded_tokens(case: Recorded, rule: str) -> None:
    values = [x for row in oracles_behaviour.divergences(case.log_ratios, rule) for x in row]
    low, high = _cut(values)
    if rule.endswith("k1"):
        low, high = math.exp(low), math.exp(high)
    else:
        low = 0.5
    found = case.corrected(reject=rule, reject_low=low, reject_high=high)
    expected = oracles_behaviour.rejection_kept(case.log_ratios, rule, low, high)
    assert 0 < sum(expected) < len(expected)
    assert found.token_kept.tolist() == expected
    assert bool(found.action_kept.all())


@pytest.mark.parametrize("case", RECORDED)
def test_veto_between_the_recorded_tokens(case: Recorded) -> None:
    threshold = math.exp(_cut([min(row) for row in case.log_ratios])[0])
    found = case.corrected(veto=threshold)
    expected = oracles_behaviour.veto_kept(case.log_ratios, threshold)
    assert 0 < sum(expected) < len(expected)
    assert found.action_kept[case.index].tolist() == expected
    assert bool(found.token_kept.all())


@pytest.mark.parametrize("case", RECORDED)
def test_a_token_is_kept_that_no_mask_drops(case: Recorded) -> None:
    tokens = [x for row in case.log_ratios for x in row]
    floor, cap = (math.exp(one) for one in _cut(tokens))
    low, high = (math.exp(-one) for one in reversed(_cut([mean(row) for row in case.log_ratios])))
    veto = math.exp(_cut([min(row) for row in case.log_ratios])[0])
    square = oracles_behaviour.mean_square(tokens) * 0.9
    found = case.corrected(
        ratio="token",
        behaviour_weight="token",
        behaviour_floor=floor,
        behaviour_cap=cap,
        behaviour_beyond="mask",
        reject="action_mean_k1",
        reject_low=low,
        reject_high=high,
        veto=veto,
        m2_threshold=square,
    )
    smallest = sorted(tokens, key=abs)[: oracles_behaviour.second_moment_kept(tokens, square)]
    each = [
        [inside for _, inside in oracles_behaviour.bounded(tokens, floor, cap, "mask")],
        oracles_behaviour.rejection_kept(case.log_ratios, "action_mean_k1", low, high),
        [x in smallest for x in tokens],
    ]
    assert found.token_kept.tolist() == [all(column) for column in zip(*each, strict=True)]
    vetoed = oracles_behaviour.veto_kept(case.log_ratios, veto)
    assert found.action_kept[case.index].tolist() == vetoed


@pytest.mark.parametrize("case", RECORDED)
@pytest.mark.parametrize("beyond", ["mask", "truncate"])
@pytest.mark.parametrize("kind", ["token", "geo", "prod", "sqrt"])
def test_weights_bounded_between_the_recorded_ones(case: Recorded, beyond: str, kind: str) -> None:
    root = {"geo": lambda row: len(row), "prod": lambda row: 1, "sqrt": lambda row: len(row) ** 0.5}
    logs = (
        [x for row in case.log_ratios for x in row]
        if kind == "token"
        else [sum(row) / root[kind](row) for row in case.log_ratios]
    )
    low, high = (math.exp(one) for one in _cut(logs))
    found = case.corrected(
        ratio="token",
        behaviour_weight=kind,
        behaviour_floor=low,
        behaviour_cap=high,
        behaviour_beyond=beyond,
    )
    expected = oracles_behaviour.bounded(logs, low, high, beyond)
    per_token = kind == "token"
    close(
        found.token_weights if per_token else found.action_weights,
        [weight for weight, _ in expected],
    )
    kept = found.token_kept if per_token else found.action_kept
    assert kept.tolist() == [kept for _, kept in expected]
    outside = [not low <= math.exp(one) <= high for one in logs]
    assert 0 < sum(outside) < len(outside)


def _cut(values: list[float]) -> tuple[float, float]:
    """Bounds inside the range of the values: beyond the smallest and before the largest of them."""
    distinct = sorted(set(values))
    if len(distinct) < 3:
        pytest.skip(f"{len(distinct)} different values cannot be cut")
    return (distinct[0] + distinct[1]) / 2, (distinct[-2] + distinct[-1]) / 2
