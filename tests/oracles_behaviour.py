"""Slow definitions of what a behaviour correction keeps: divergences, vetoes, bounds, M2PO.

Plain Python over lists of log proximal - log behaviour; one action is one list of tokens. What is
kept is told per token, action by action.
"""

import math
from collections.abc import Sequence
from statistics import mean

Numbers = Sequence[float]
Rows = Sequence[Numbers]


def divergences(log_ratios: Rows, rule: str) -> list[list[float]]:
    """What `rule`, SCOPE_ESTIMATOR, compares, per token: k1 = -log r, k2 = log^2 r / 2,
    k3 = r - 1 - log r; of an action the same number for all its tokens."""
    scope, _, estimator = rule.rpartition("_")
    estimate = {
        "k1": lambda x: -x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(x) - 1 - x,
    }[estimator]
    rows = [[estimate(x) for x in row] for row in log_ratios]
    if scope == "token":
        return rows
    over = {"action_sum": sum, "action_mean": mean, "action_max": max}[scope]
    return [[over(row)] * len(row) if row else [] for row in rows]


def rejection_kept(log_ratios: Rows, rule: str, low: float, high: float) -> list[bool]:
    """k1 within [log low, log high], k2 and k3 at most `high`."""
    floor, ceiling = (math.log(low), math.log(high)) if rule.endswith("k1") else (-math.inf, high)
    return [floor <= x <= ceiling for row in divergences(log_ratios, rule) for x in row]


def veto_kept(log_ratios: Rows, threshold: float) -> list[bool]:
    """An action goes whole when the ratio of one of its tokens is below the threshold."""
    return [all(math.exp(x) >= threshold for x in row) for row in log_ratios for _ in row]


def bounded(log_weights: Numbers, low: float, high: float, beyond: str) -> list[tuple[float, bool]]:
    """exp of each, at the nearer bound ("truncate") or dropped ("mask") where it is outside."""
    found = []
    for weight in map(math.exp, log_weights):
        inside = low <= weight <= high
        if beyond == "mask":
            found.append((weight, inside))
        else:
            found.append((min(max(weight, low), high), True))
    return found


def second_moment_kept(log_ratios: Numbers, threshold: float) -> int:
    """M2PO: how many tokens stay when the largest squares are dropped one by one until the mean of
    the rest is below the threshold; at least one."""
    squares = sorted(value * value for value in log_ratios)
    while len(squares) > 1 and mean(squares) >= threshold:
        squares.pop()
    return len(squares)


def mean_square(values: Numbers) -> float:
    return mean(value * value for value in values)
