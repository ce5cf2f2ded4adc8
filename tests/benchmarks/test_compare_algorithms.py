"""The comparison reads what runs left behind and says it as it is; small fabricated run files."""

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks import compare_algorithms
from benchmarks._comparison import (
    Run,
    draw,
    is_finished,
    objections,
    read_run,
    smoothed,
    summarise,
    table,
)
from benchmarks.compare_algorithms import settings
from capo.configs.load import load, to_json
from capo.learner.evaluation_round import ModeResult
from capo.learner.run_file import RunFile

CONFIG = "configs/quickstart.toml"
UPDATES = 3


def played(success: float, games: int = 40) -> ModeResult:
    return ModeResult(
        episodes=games,
        given_up=0,
        success=success,
        success_stderr=0.0,
        mean_return=success,
        mean_steps=5.0,
    )


def fabricate(
    run_dir: Path,
    algorithm: str,
    seed: int,
    *,
    training: tuple[float, ...] = (0.2, 0.4, 0.6),
    before: float = 0.1,
    after: float | None = 0.5,
    overrides: tuple[str, ...] = (f"updates={UPDATES}",),
) -> Path:
    """A run file as `capo run` leaves it, without steps; `after` None: it was interrupted."""
    config = load(CONFIG, settings(algorithm, seed, CONFIG, overrides))
    run_dir.mkdir(parents=True)
    seconds = iter(range(0, 10**6, 30))
    file = RunFile.create(
        run_dir,
        {"run_id": "test", "config": to_json(config).decode()},
        clock=lambda: float(next(seconds)),
    )

    def evaluate(version: int, success: float) -> None:
        results = {"sampled": played(success), "greedy": played(success + 0.1)}
        number = file.begin_evaluation(version, ["sampled", "greedy"], [])
        file.finish_evaluation(number, msgspec.json.encode(results))

    evaluate(0, before)
    for version, outcome in enumerate(training):
        file.begin_update(version, [])
        file.finish_update(version, seeds={}, metrics={"batch/outcome": outcome}, result=b"")
    if after is not None:
        evaluate(len(training), after)
    file.close()
    return run_dir


def run_of(algorithm: str, seed: int, after: float, **changes) -> Run:
    fields = {
        "algorithm": algorithm,
        "seed": seed,
        "critic": algorithm != "grpo",
        "clip": (0.2, 0.2),
        "batch_episodes": 48,
        "success": (0.2, 0.4),
        "minutes": 2.0,
        "before": {"sampled": played(0.1), "greedy": played(0.3)},
        "after": {"sampled": played(after), "greedy": played(after + 0.05)},
    }
    return Run(**(fields | changes))


def test_a_run_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    run = read_run(fabricate(tmp_path / "grpo-s3", "grpo", 3, after=0.7))
    assert (run.algorithm, run.seed, run.critic, run.clip) == ("grpo", 3, False, (0.2, 0.2))
    assert run.success == (0.2, 0.4, 0.6)
    assert run.episodes == UPDATES * load(CONFIG).learner.batch_episodes
    assert run.before["sampled"].success == 0.1
    assert run.after["greedy"].success == pytest.approx(0.8)
    assert run.minutes == pytest.approx(2.5)  # five ticks of 30 s between first batch and last end


def test_a_run_without_its_last_evaluation_is_not_finished(tmp_path: Path) -> None:
    run_dir = fabricate(tmp_path / "capo-s0", "capo", 0, after=None)
    assert not is_finished(run_dir)
    with pytest.raises(ValueError, match="not finished"):
        read_run(run_dir)


def test_gaps_are_taken_between_runs_of_the_same_seed() -> None:
    runs = [run_of("capo", 0, 0.5), run_of("capo", 1, 0.7), run_of("ppo", 1, 0.6)]
    runs.append(run_of("ppo", 0, 0.1))
    capo, ppo = summarise(runs)
    assert capo.gap == (0.0, 0.0)
    assert ppo.seeds == (1, 0)
    assert ppo.gap == pytest.approx((-0.1, -0.4))
    assert ppo.sampled == (0.6, 0.1)
    assert ppo.greedy == pytest.approx((0.65, 0.15))


def test_the_table_orders_by_success_and_gives_spreads_and_seeds() -> None:
    runs = [run_of("capo", s, x) for s, x in enumerate((0.50, 0.60, 0.70))]
    runs += [run_of("grpo", s, x) for s, x in enumerate((0.80, 0.80, 0.95))]
    text = table(runs)
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows[0].startswith("| `grpo` | no | 0.2 | 3 | 85.0 ± 8.7 % | 90.0 ± 8.7 % |")
    assert rows[1].startswith("| `capo` | yes | 0.2 | 3 | 60.0 ± 10.0 % |")
    assert "| +25.0 ± 5.0 |" in rows[0]
    assert "96 training episodes" in text
    assert "capo 0: 50.0%, 1: 60.0%, 2: 70.0%; grpo 0: 80.0%" in text
    assert "Mind" not in text


def test_what_speaks_against_a_comparison_is_said() -> None:
    runs = [
        run_of("capo", 0, 0.5),
        run_of("ppo", 0, 0.6, before={"sampled": played(0.1), "greedy": played(0.4)}),
        run_of("grpo", 0, 0.6, success=(0.1, 0.1, 0.1)),
    ]
    uneven, unlike, few = objections(runs)
    assert uneven.endswith("on 144, 96")
    assert "seed 0 did not start alike: greedy success was 0.300, 0.400" in unlike
    assert few == "fewer than three seeds: capo 1, ppo 1, grpo 1"
    assert table(runs).count("**Mind:**") == 3


def test_a_curve_is_the_mean_of_the_last_updates() -> None:
    np.testing.assert_allclose(smoothed([1.0, 0.0, 0.5, 0.5], window=2), [1.0, 0.5, 0.25, 0.5])


def test_settings_differ_in_the_algorithm_alone() -> None:
    configs = {
        name: load(CONFIG, settings(name, 2, CONFIG, ["updates=9"]))
        for name in compare_algorithms.ALGORITHMS
    }
    tuned = load(CONFIG).algorithm
    assert configs["capo"].algorithm == tuned
    assert configs["gspo"].algorithm.clip_high == tuned.clip_high
    assert configs["ppo"].algorithm.clip_high == 0.2
    assert {config.scheduler.group_size for config in configs.values()} == {1, 8}
    for name, config in configs.items():
        assert (config.algorithm.preset, config.seed, config.updates) == (name, 2, 9)
        assert not config.algorithm.bootstrap_truncated
        assert config.learner == configs["capo"].learner
        assert config.warm_start == configs["capo"].warm_start
        assert config.environment == configs["capo"].environment


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["compare_algorithms", *arguments])
    return compare_algorithms.main()


def test_finished_runs_are_reported_and_not_played_again(tmp_path, monkeypatch, capsys) -> None:
    for number, algorithm in enumerate(("capo", "ppo")):
        for seed in (0, 1, 2):
            run_dir = tmp_path / f"{algorithm}-s{seed}"
            fabricate(run_dir, algorithm, seed, after=0.3 + 0.1 * seed + 0.2 * number)
    common = ("--output", str(tmp_path), "--algorithms", "capo", "ppo")
    assert call(monkeypatch, *common, "--set", f"updates={UPDATES}") == 0
    printed = capsys.readouterr().out
    assert printed.count("finished already") == 6
    assert not list(tmp_path.glob("*.log"))
    text = (tmp_path / "comparison.md").read_text()
    assert text in printed
    assert "| `ppo` | yes | 0.2 | 3 | 60.0 ± 10.0 % |" in text
    assert "| +20.0 ± 0.0 |" in text
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    runs = msgspec.json.decode((tmp_path / "comparison.json").read_bytes(), type=list[Run])
    assert [(run.algorithm, run.seed) for run in runs] == [
        *(("capo", seed) for seed in range(3)),
        *(("ppo", seed) for seed in range(3)),
    ]


def test_a_report_leaves_out_what_is_not_finished(tmp_path, monkeypatch, capsys) -> None:
    fabricate(tmp_path / "capo-s0", "capo", 0)
    fabricate(tmp_path / "ppo-s0", "ppo", 0, after=None)
    arguments = ("--output", str(tmp_path), "--report-only", "--set", f"updates={UPDATES}")
    assert call(monkeypatch, *arguments) == 0
    assert "`ppo`" not in capsys.readouterr().out


def test_a_run_of_another_configuration_is_not_taken_for_one_of_these(
    tmp_path, monkeypatch, capsys
) -> None:
    fabricate(tmp_path / "capo-s0", "capo", 0)
    with pytest.raises(SystemExit):
        call(monkeypatch, "--output", str(tmp_path), "--report-only", "--set", "updates=4")
    error = capsys.readouterr().err
    assert "capo-s0 holds a run of another configuration; choose another --output" in error


def test_an_unknown_algorithm_is_refused_before_anything_starts(
    tmp_path, monkeypatch, capsys
) -> None:
    with pytest.raises(SystemExit):
        call(monkeypatch, "--output", str(tmp_path / "new"), "--algorithms", "capo", "gigbo")
    assert "did you mean 'gigpo'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("algorithms", "columns"), [(1, 1), (2, 2), (4, 3), (6, 3)])
def test_the_figure_has_a_labelled_panel_per_algorithm_and_no_empty_column(
    algorithms: int, columns: int
) -> None:
    runs = [
        Run(
            algorithm=f"method-{number}",
            seed=0,
            critic=False,
            clip=(0.2, 0.2),
            batch_episodes=8,
            success=(0.1, 0.2, 0.3),
            minutes=1.0,
            before={},
            after={},
        )
        for number in range(algorithms)
    ]
    figure = draw(runs)
    used = [axis for axis in figure.axes if axis.axison]
    assert len(used) == algorithms
    assert figure.axes[0].get_gridspec().ncols == columns
    lowest = [axis for axis in used if axis.get_xlabel()]
    assert lowest == used[-columns:]  # of each column
