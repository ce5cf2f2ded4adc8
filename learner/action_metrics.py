"""Metrics of one update from per-action arrays. Definitions: docs/metrics.md.

R rows: one per trained action and epoch. Knows no tensors and no models.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

MIN_BIN = 8  # actions a length bin needs to speak about a variance
TURN_EDGES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
STALENESS_EDGES = (0, 1, 2, 3, 4, 8)


class ActionTable(Struct, frozen=True, kw_only=True, eq=False):
    """In any order. Optional columns are None where the algorithm has no such thing."""

    length: Integers  # tokens
    turn: Integers  # index within its episode
    version: Integers  # oldest policy version among its tokens
    staleness: Integers  # learner version - version
    advantage: Floats
    log_ratio: Floats
    centred_sum: Floats  # sum over kept tokens of z - its mean over the minibatch's kept tokens
    z_sum: Floats  # sum over kept tokens of z = log pi - log proximal
    kept_tokens: Floats  # tokens that no mask dropped; 0 for an action that is not counted
    units: Floats  # ratio units that took part: 1 for an action ratio, tokens for a token ratio
    out_of_range: Floats  # of these
    active: Floats  # of these
    clamped: Floats  # tokens whose log-ratio met the numerical limit
    mismatch_sum: Floats  # sum over tokens of log behaviour - log proximal (k1)
    mismatch_k3_sum: Floats  # sum over tokens of k3 of KL(behaviour || proximal)
    weight: Floats  # behaviour weight after truncation (token mean)
    weight_truncated: Flags
    kept: Flags
    value: Floats | None = None  # at the boundary, before the update
    returns: Floats | None = None


def action_metrics(table: ActionTable) -> dict[str, float]:
    """Flat names to finite numbers; what is undefined is absent."""
    if len(table.length) == 0:
        return {}
    metrics: dict[str, float] = {}
    for name, rows in _cohorts(table):
        metrics |= _clip_fractions(table, rows, name)
    metrics |= _ratio_metrics(table)
    metrics |= _mismatch_metrics(table)
    metrics |= _weight_metrics(table)
    metrics |= _critic_metrics(table)
    metrics |= {
        "staleness/mean": float(table.staleness.mean()),
        "staleness/max": float(table.staleness.max()),
        "advantage/mean": float(table.advantage.mean()),
        "advantage/std": float(table.advantage.std()),
        "advantage/positive": float((table.advantage > 0).mean()),
    }
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


def bin_labels(values: Integers, edges: tuple[int, ...]) -> list[str]:
    """The bin of each value: "3" for a bin of one number, "4_7", "48_up" for the last."""
    labels = [str(low) if high == low + 1 else f"{low}_{high - 1}" for low, high in pairwise(edges)]
    labels.append(f"{edges[-1]}_up")
    found = np.searchsorted(np.asarray(edges), values, side="right") - 1
    return [labels[max(index, 0)] for index in found]


def length_labels(lengths: Integers | Floats) -> list[str]:
    """Octaves: "1", "2_3", "4_7", ..."""
    exponents = np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    return ["1" if e == 0 else f"{2**e}_{2 ** (e + 1) - 1}" for e in exponents.tolist()]


def explained_variance(values: Floats, returns: Floats) -> float | None:
    """1 - Var(returns - values) / Var(returns); None when all returns are equal."""
    spread = float(returns.var()) if len(returns) else 0.0
    scale = float(np.abs(returns).max()) if len(returns) else 0.0
    if spread <= 1e-12 * max(scale * scale, 1e-12):
        return None
    return 1.0 - float((returns - values).var()) / spread


def variance_slope(centred_sums: Floats, lengths: Integers | Floats) -> float | None:
    """Slope of log Var(centred sum) on log length over octaves of length, weighted by actions.

    1 for independent tokens, 2 for fully correlated ones; the paper measures .90. None with fewer
    than two octaves of at least `MIN_BIN` actions and some variance.
    """
    labels = np.asarray(length_labels(lengths))
    points = []
    for label in np.unique(labels):
        rows = labels == label
        spread = float(centred_sums[rows].var())
        if rows.sum() >= MIN_BIN and spread > 0:
            points.append((np.log(lengths[rows].mean()), np.log(spread), float(rows.sum())))
    if len(points) < 2:
        return None
    x, y, weight = np.asarray(points).T
    x, y = x - np.average(x, weights=weight), y - np.average(y, weights=weight)
    return float((weight * x * y).sum() / (weight * x * x).sum())


def effective_sample_size(weights: Floats) -> float | None:
    """(sum w)^2 / (n sum w^2) of n weights: 1 when all are equal, 1/n when one has it all; None
    where nothing has any."""
    squares = float((weights * weights).sum()) * len(weights)
    return float(weights.sum()) ** 2 / squares if squares > 0 else None


def _cohorts(table: ActionTable) -> Iterator[tuple[str, Flags]]:
    """All rows, then the rows of each bin, with the suffix of their metrics."""
    yield "", np.ones(len(table.length), dtype=np.bool_)
    sign = np.sign(table.advantage).astype(np.int64).tolist()
    labelled = {
        "length": length_labels(table.length),
        "turn": bin_labels(table.turn, TURN_EDGES),
        "staleness": bin_labels(table.staleness, STALENESS_EDGES),
        "advantage": [("zero", "positive", "negative")[one] for one in sign],
    }
    for kind, labels in labelled.items():
        column = np.asarray(labels)
        for label in np.unique(column):
            yield f"/{kind}_{label}", column == label


def _clip_fractions(table: ActionTable, rows: Flags, suffix: str) -> dict[str, float]:
    units = float(table.units[rows].sum())
    if units == 0:
        return {}
    out = float(table.out_of_range[rows].sum())
    active = float(table.active[rows].sum())
    found = {f"ratio/out_of_range{suffix}": out / units, f"ratio/active{suffix}": active / units}
    if out > 0:
        found[f"ratio/active_of_out_of_range{suffix}"] = active / out
    return found


def _ratio_metrics(table: ActionTable) -> dict[str, float]:
    """mu over the tokens that `Statistics.mu` counts; the rest over actions that took part."""
    metrics = {"ratio/clamped_tokens": float(table.clamped.sum() / table.length.sum())}
    cohorts = np.asarray(bin_labels(table.staleness, STALENESS_EDGES))
    for suffix, rows in (
        ("", np.ones(len(cohorts), dtype=np.bool_)),
        *((f"/staleness_{label}", cohorts == label) for label in np.unique(cohorts)),
    ):
        tokens = float(table.kept_tokens[rows].sum())
        if tokens > 0:
            metrics[f"ratio/mu{suffix}"] = float(table.z_sum[rows].sum()) / tokens
    took_part = table.units > 0
    if took_part.any():
        for percent in (1, 50, 99):
            found = np.percentile(table.log_ratio[took_part], percent)
            metrics[f"ratio/log_w_p{percent}"] = float(found)
    slope = variance_slope(table.centred_sum[took_part], table.kept_tokens[took_part])
    if slope is not None:
        metrics["ratio/variance_slope"] = slope
    return metrics


def _mismatch_metrics(table: ActionTable) -> dict[str, float]:
    fresh = table.staleness <= 0
    metrics: dict[str, float] = {}
    for suffix, rows in (("", fresh | ~fresh), ("/fresh", fresh), ("/stale", ~fresh)):
        tokens = float(table.length[rows].sum())
        if tokens > 0:
            metrics[f"mismatch/k1{suffix}"] = float(table.mismatch_sum[rows].sum()) / tokens
            metrics[f"mismatch/k3{suffix}"] = float(table.mismatch_k3_sum[rows].sum()) / tokens
    return metrics


def _weight_metrics(table: ActionTable) -> dict[str, float]:
    metrics = {
        "weight/mean": float(table.weight.mean()),
        "weight/p99": float(np.percentile(table.weight, 99)),
        "weight/truncated": float(table.weight_truncated.mean()),
        "weight/dropped_actions": float((~table.kept).mean()),
    }
    size = effective_sample_size(table.weight * table.kept)
    if size is not None:
        metrics["weight/effective_sample_size"] = size
    return metrics


def _critic_metrics(table: ActionTable) -> dict[str, float]:
    if table.value is None or table.returns is None:
        return {}
    metrics: dict[str, float] = {}
    labelled = {
        "": ["all"] * len(table.length),
        "/turn": bin_labels(table.turn, TURN_EDGES),
        "/staleness": bin_labels(table.staleness, STALENESS_EDGES),
    }
    for kind, labels in labelled.items():
        column = np.asarray(labels)
        for label in np.unique(column):
            rows = column == label
            explained = explained_variance(table.value[rows], table.returns[rows])
            if explained is not None:
                name = f"critic/explained_variance{kind}"
                metrics[f"{name}_{label}" if kind else name] = explained
    return metrics
