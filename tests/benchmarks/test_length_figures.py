"""Figures 3 and 6: what they say about laws that are known, and what they leave on disk."""

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks import clip_by_length, length_variance
from benchmarks._actions import Actions, synthetic


def actions_of(length, z_sum, advantage, clip: float = 0.1) -> Actions:
    length = np.asarray(length)
    return Actions(
        source="by hand",
        length=length,
        z_sum=np.asarray(z_sum, dtype=np.float64),
        mu=np.zeros(len(length)),
        advantage=np.asarray(advantage, dtype=np.float64),
        clip_low=clip,
        clip_high=clip,
    )


def test_fractions_by_length_are_those_counted_by_hand() -> None:
    """Length 1: three of four are out, two of them held. Length 4 halves the log-ratio: none is."""
    n = 25
    length = [1] * 4 * n + [4] * n
    z_sum = [0.2, 0.2, -0.2, 0.05] * n + [0.15] * n
    advantage = [1, -1, -1, 1] * n + [1] * n
    result = clip_by_length.measure(actions_of(length, z_sum, advantage))
    (half,) = [curve for curve in result.curves if curve.alpha == 0.5]
    short, long = half.bins
    assert (short.lengths, long.lengths) == ((1, 1), (4, 4))
    assert (short.actions, short.out_of_range, short.active) == (100, 0.75, 0.5)
    assert (long.actions, long.out_of_range, long.active) == (25, 0.0, 0.0)
    assert half.slope == pytest.approx(-0.375)  # two doublings
    assert half.flat == "no"
    assert "alpha = 0.5 is not flat" in result.verdict
    assert result.curves[0].bins[1].out_of_range == 1.0  # the product keeps all of it


def test_alpha_one_half_is_flat_on_independent_tokens_and_alone_in_it() -> None:
    result = clip_by_length.measure(synthetic(1.0, 20_000, seed=0))
    assert result.flattest_alpha == 0.5
    assert [curve.flat for curve in result.curves] == ["no", "no", "yes", "no", "no"]
    assert "alpha = 0.5 is flat" in result.verdict
    assert [np.sign(curve.slope) for curve in result.curves if curve.alpha != 0.5] == [1, 1, -1, -1]
    half = result.curves[2]
    assert half.active == pytest.approx(half.out_of_range / 2, abs=0.02)


def test_fully_correlated_tokens_need_alpha_one() -> None:
    result = clip_by_length.measure(synthetic(1.98, 20_000, seed=0))
    assert result.flattest_alpha == 1.0
    assert result.curves[2].flat == "no"


def test_few_actions_leave_flatness_undecided() -> None:
    result = clip_by_length.measure(synthetic(1.0, 300, seed=0))
    assert result.curves[2].flat == "undecided"
    assert "may be flat" in result.verdict


def test_nothing_out_of_range_is_no_finding() -> None:
    verdict = clip_by_length.measure(synthetic(1.0, 500, seed=0, clip=0.2)).verdict
    assert "says nothing" in verdict


def test_equal_lengths_have_no_slope() -> None:
    slope, stderr = clip_by_length.slope_per_doubling(np.full(9, 4.0), np.arange(9.0))
    assert (slope, stderr) == (0.0, np.inf)


def test_the_slope_s_error_is_the_spread_over_repetitions() -> None:
    generator = np.random.default_rng(0)
    length = 2.0 ** generator.integers(0, 6, 400)
    chance = 0.2 + 0.1 * np.log2(length)
    found = [
        clip_by_length.slope_per_doubling(length, (generator.random(400) < chance).astype(float))
        for _ in range(300)
    ]
    slopes, errors = np.array(found).T
    assert slopes.mean() == pytest.approx(0.1, abs=0.003)
    assert errors.mean() == pytest.approx(slopes.std(), rel=0.1)


@pytest.mark.parametrize(("exponent", "near"), [(1.0, "no"), (0.9, "yes"), (1.4, "no")])
def test_the_exponent_that_z_was_made_with_is_found(exponent: float, near: str) -> None:
    result = length_variance.measure(synthetic(exponent, 8000, seed=0))
    assert result.exponent == pytest.approx(exponent, abs=0.03)
    assert result.exponent_stderr < 0.03
    assert result.near_paper == near
    assert f"length^{result.exponent:.2f}" in result.verdict


def test_the_restored_mean_stays_level_where_the_square_root_alone_drifts() -> None:
    result = length_variance.measure(synthetic(1.0, 15_000, seed=0))
    first, last = result.bins[0], result.bins[-1]
    assert last.mean_log_ratio["square_root"] < -7e-4
    assert abs(last.mean_log_ratio["capo"] - first.mean_log_ratio["capo"]) < 2e-4


def test_one_length_gives_no_exponent() -> None:
    with pytest.raises(ValueError, match="200 actions of 3 to 3 tokens are too few, or too alike"):
        length_variance.measure(actions_of([3] * 200, np.arange(200.0), [1] * 200))


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [
        (clip_by_length, "clip_by_length", clip_by_length.Result),
        (length_variance, "length_variance", length_variance.Result),
    ],
)
def test_a_command_leaves_a_figure_and_its_numbers(
    module, name: str, kind: type, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(sys, "argv", ["it", "--actions", "2000", "--output", str(tmp_path)])
    module.main()
    results = msgspec.json.decode((tmp_path / f"{name}.json").read_bytes(), type=list[kind])
    assert [result.actions for result in results] == [2000, 2000]
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(result.verdict in printed for result in results)
    json.loads((tmp_path / f"{name}.json").read_text())  # plain JSON: no NaN, no infinity


def test_a_run_that_is_not_there_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["it", "--actions", "50", "--run", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        clip_by_length.main()
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize("module", [clip_by_length, length_variance])
def test_lengths_that_are_nearly_alike_carry_a_reservation(module) -> None:
    generator = np.random.default_rng(0)
    length = generator.integers(3, 7, 2000)
    narrow = actions_of(length, generator.normal(0, 0.1, 2000), generator.choice([-1, 1], 2000))
    result = module.measure(narrow)
    assert result.doublings == 1.0
    assert result.verdict.startswith("lengths of 3 to 6 tokens")
    assert not module.measure(synthetic(1.0, 2000, seed=0)).verdict.startswith("lengths")
