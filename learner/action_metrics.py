"""Metrics of one update from per-action arrays. Definitions: docs/metrics.md."""

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray


class ActionTable(Struct, frozen=True, kw_only=True, eq=False):
    """One row per trained action of an update, in any order. Optional columns are None where the
    algorithm has no such thing."""

    length: NDArray[np.int64]  # tokens
    turn: NDArray[np.int64]  # index within its episode
    version: NDArray[np.int64]  # oldest policy version among its tokens
    staleness: NDArray[np.int64]  # learner version - version
    advantage: NDArray[np.float64]
    log_ratio: NDArray[np.float64]
    centred_sum: NDArray[np.float64]
    z_sum: NDArray[np.float64]  # sum over its tokens of log pi - log proximal
    units: NDArray[np.float64]
    out_of_range: NDArray[np.float64]
    active: NDArray[np.float64]
    clamped: NDArray[np.float64]
    mismatch_sum: NDArray[np.float64]  # sum over tokens of behaviour - proximal (k1)
    mismatch_k3_sum: NDArray[np.float64]  # sum over tokens of k3(behaviour || proximal)
    weight: NDArray[np.float64]  # behaviour weight after truncation (token mean)
    weight_truncated: NDArray[np.bool_]
    kept: NDArray[np.bool_]
    value: NDArray[np.float64] | None = None  # at the boundary, before the update
    returns: NDArray[np.float64] | None = None


def action_metrics(table: ActionTable) -> dict[str, float]:
    """Flat names to finite numbers; what is undefined is absent."""
    raise NotImplementedError
