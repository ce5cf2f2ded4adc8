"""Metrics of an update: what each number means, and that undefined ones are absent."""

import math
from typing import Any

import numpy as np
import pytest

from capo.learner.action_metrics import (
    ActionTable,
    action_metrics,
    bin_labels,
    effective_sample_size,
    explained_variance,
    length_labels,
    variance_slope,
)


def table(rows: int, **columns: Any) -> ActionTable:
    floats = dict.fromkeys(
        (
            "advantage",
            "log_ratio",
            "centred_sum",
            "z_sum",
            "out_of_range",
            "active",
            "clamped",
            "mismatch_sum",
            "mismatch_k3_sum",
        ),
        0.0,
    )
    held: dict[str, Any] = {name: np.full(rows, value) for name, value in floats.items()}
    held |= {
        "units": np.ones(rows),
        "weight": np.ones(rows),
        "length": np.full(rows, 4),
        "turn": np.zeros(rows, dtype=np.int64),
        "version": np.full(rows, 3),
        "staleness": np.zeros(rows, dtype=np.int64),
        "weight_truncated": np.zeros(rows, dtype=np.bool_),
        "kept": np.ones(rows, dtype=np.bool_),
    }
    held |= {name: np.asarray(values) for name, values in columns.items()}
    held.setdefault("kept_tokens", held["length"])  # no mask
    return ActionTable(**held)


def test_clip_fractions_overall_and_by_cohort() -> None:
    found = action_metrics(
        table(
            4,
            length=[1, 5, 6, 40],
            turn=[0, 1, 5, 60],
            staleness=[0, 0, 2, 9],
            advantage=[1.0, -1.0, -2.0, 0.0],
            out_of_range=[1.0, 1.0, 0.0, 0.0],
            active=[1.0, 0.0, 0.0, 0.0],
        )
    )
    assert found["ratio/out_of_range"] == 0.5
    assert found["ratio/active"] == 0.25
    assert found["ratio/active_of_out_of_range"] == 0.5
    assert found["ratio/out_of_range/length_1"] == 1.0
    assert found["ratio/out_of_range/length_4_7"] == 0.5
    assert found["ratio/active/length_4_7"] == 0.0
    assert found["ratio/out_of_range/length_32_63"] == 0.0
    assert "ratio/active_of_out_of_range/length_32_63" not in found
    assert found["ratio/out_of_range/turn_0"] == 1.0
    assert found["ratio/out_of_range/turn_4_5"] == 0.0
    assert found["ratio/out_of_range/turn_48_up"] == 0.0
    assert found["ratio/out_of_range/staleness_0"] == 1.0
    assert found["ratio/out_of_range/staleness_8_up"] == 0.0
    assert found["ratio/active/advantage_positive"] == 1.0
    assert found["ratio/active/advantage_negative"] == 0.0
    assert found["ratio/out_of_range/advantage_zero"] == 0.0


def test_token_ratios_weigh_actions_by_their_units() -> None:
    found = action_metrics(table(2, units=[1.0, 9.0], out_of_range=[1.0, 0.0]))
    assert found["ratio/out_of_range"] == pytest.approx(0.1)


def test_mu_is_weighted_by_tokens_and_told_per_cohort() -> None:
    found = action_metrics(table(2, length=[1, 3], z_sum=[0.4, 0.0], staleness=[0, 1]))
    assert found["ratio/mu"] == pytest.approx(0.1)
    assert found["ratio/mu/staleness_0"] == pytest.approx(0.4)
    assert found["ratio/mu/staleness_1"] == 0.0


def test_a_mask_leaves_the_kept_tokens_and_the_actions_that_have_some() -> None:
    """Twenty whole actions, of which half keep 2 of their 8 tokens, and two that keep none."""
    spread = np.tile([1.0, -1.0], 10)
    found = action_metrics(
        table(
            22,
            length=np.full(22, 8),
            kept_tokens=[*[8.0] * 10, *[2.0] * 10, 0.0, 0.0],
            z_sum=[*[0.8] * 10, *[0.2] * 10, 0.0, 0.0],
            units=[*[1.0] * 20, 0.0, 0.0],
            log_ratio=[*[0.1] * 20, 9.0, 9.0],
            centred_sum=[*(np.sqrt(8) * spread[:10]), *(np.sqrt(2) * spread[10:]), 50.0, -50.0],
            staleness=[*[0] * 20, 1, 1],
        )
    )
    assert found["ratio/mu"] == pytest.approx(0.1)
    assert "ratio/mu/staleness_1" not in found
    assert [found[f"ratio/log_w_p{p}"] for p in (1, 50, 99)] == pytest.approx([0.1] * 3)
    assert found["ratio/variance_slope"] == pytest.approx(1.0)


def test_where_nothing_is_kept_nothing_is_said_about_ratios() -> None:
    found = action_metrics(table(3, kept_tokens=np.zeros(3), units=np.zeros(3)))
    assert not any(name.startswith(("ratio/mu", "ratio/log_w", "ratio/out")) for name in found)


def test_percentiles_of_the_log_ratio() -> None:
    found = action_metrics(table(101, log_ratio=np.arange(101.0)))
    assert [found[f"ratio/log_w_p{p}"] for p in (1, 50, 99)] == [1.0, 50.0, 99.0]


@pytest.mark.parametrize(("correlated", "expected"), [(False, 1.0), (True, 2.0)])
def test_variance_slope_tells_independent_from_correlated_tokens(
    correlated: bool, expected: float
) -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(4, 256, size=4000)
    scale = lengths if correlated else np.sqrt(lengths)
    slope = variance_slope(scale * generator.normal(size=4000), lengths)
    assert slope is not None
    assert abs(slope - expected) < 0.1


def test_variance_slope_needs_two_lengths_and_some_variance() -> None:
    assert variance_slope(np.ones(100), np.arange(100) + 1) is None
    assert variance_slope(np.random.default_rng(0).normal(size=50), np.full(50, 8)) is None
    assert "ratio/variance_slope" not in action_metrics(table(50))


def test_mismatch_separates_engine_noise_from_staleness() -> None:
    found = action_metrics(
        table(
            3,
            length=[2, 2, 4],
            staleness=[0, 0, 1],
            mismatch_sum=[0.2, 0.0, 2.0],
            mismatch_k3_sum=[0.02, 0.02, 0.8],
        )
    )
    assert found["mismatch/k1/fresh"] == pytest.approx(0.05)
    assert found["mismatch/k1/stale"] == pytest.approx(0.5)
    assert found["mismatch/k1"] == pytest.approx(2.2 / 8)
    assert found["mismatch/k3/stale"] == pytest.approx(0.2)
    assert "mismatch/k1/stale" not in action_metrics(table(3))


def test_weights() -> None:
    found = action_metrics(
        table(
            4,
            weight=[1.0, 1.0, 2.0, 1.0],
            weight_truncated=[False, False, True, False],
            kept=[True, True, True, False],
        )
    )
    assert found["weight/mean"] == 1.25
    assert found["weight/truncated"] == 0.25
    assert found["weight/dropped_actions"] == 0.25
    assert found["weight/effective_sample_size"] == pytest.approx(16 / (4 * 6))
    assert found["weight/p99"] == pytest.approx(1.97)


def test_the_effective_sample_size_is_the_fraction_of_the_weights_that_count() -> None:
    assert effective_sample_size(np.ones(7)) == pytest.approx(1.0)
    assert effective_sample_size(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert effective_sample_size(np.zeros(3)) is None


def test_explained_variance_overall_per_turn_and_per_staleness() -> None:
    found = action_metrics(
        table(
            4,
            turn=[0, 0, 1, 1],
            staleness=[0, 1, 0, 1],
            value=[0.0, 1.0, 0.0, 0.0],
            returns=[0.0, 1.0, 1.0, -1.0],
        )
    )
    assert found["critic/explained_variance/turn_0"] == 1.0
    assert found["critic/explained_variance/turn_1"] == 0.0
    assert found["critic/explained_variance"] == pytest.approx(1 - 0.5 / 0.6875)
    assert "critic/explained_variance/staleness_1" in found


def test_explained_variance_is_undefined_when_all_returns_are_equal() -> None:
    assert explained_variance(np.array([0.1, 5.0]), np.array([1.0, 1.0])) is None
    assert explained_variance(np.zeros(3), np.array([0.3, 0.1 + 0.2, 0.3])) is None
    assert explained_variance(np.zeros(0), np.zeros(0)) is None
    found = action_metrics(table(2, value=[0.0, 9.0], returns=[1.0, 1.0]))
    assert not any(name.startswith("critic/") for name in found)


def test_critic_free_runs_say_nothing_about_a_critic() -> None:
    assert not any(name.startswith("critic/") for name in action_metrics(table(2)))


def test_every_number_is_finite_and_an_empty_table_says_nothing() -> None:
    assert action_metrics(table(0)) == {}
    odd = action_metrics(table(1, units=[0.0], weight=[0.0], kept=[False]))
    assert all(math.isfinite(value) for value in odd.values())
    assert "ratio/out_of_range" not in odd
    assert "weight/effective_sample_size" not in odd


def test_bins() -> None:
    assert bin_labels(np.array([0, 3, 4, 5, 47, 48, 900]), (0, 1, 2, 3, 4, 6, 48)) == [
        "0", "3", "4_5", "4_5", "6_47", "48_up", "48_up",
    ]  # fmt: skip
    assert length_labels(np.array([1, 2, 3, 4, 1023, 1024])) == [
        "1", "2_3", "2_3", "4_7", "512_1023", "1024_2047",
    ]  # fmt: skip
