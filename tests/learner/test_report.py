"""What a person reads about a run: every number of a report is the run file's."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from capo.configs.load import to_json
from capo.learner.evaluation_round import ModeResult
from capo.learner.report import report_lines
from capo.learner.run_export import export_lines
from capo.learner.run_file import RunFile
from capo.learner.run_leases import Note
from capo.learner.run_plot import plot_run
from capo.learner.run_reader import RunReader
from capo.learner.text_table import text_table
from capo.protocol.errors import RunFileError
from capo.protocol.records import EpisodeStatus
from tests.factories import run_config
from tests.learner.run_records import episode, lend


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Three updates of two episodes each, one stale, one failed, one waiting; one evaluation."""
    folder = tmp_path / "run"
    config = run_config(updates=3, batch_episodes=2)
    run_file = RunFile.create(folder, {"run_id": "abc", "config": to_json(config).decode()})
    run_file.actor_seen("ann", "host:1")
    lend(run_file, "ann", *range(9))
    for number in range(9):
        status = EpisodeStatus.ENV_ERROR if number == 7 else EpisodeStatus.TERMINATED
        delivery = episode(
            number + 1, f"t{number:08d}.1", 1 + number % 2, status, outcome=float(number < 3)
        )
        if number == 7:
            end = msgspec.structs.replace(delivery.ends[0], error="the stove exploded")
            delivery = msgspec.structs.replace(delivery, ends=(end,))
        run_file.commit([("ann", delivery)])
    run_file.record_leases([], [Note(episode_id="t00000006.1", excluded="stale")])
    for version in range(3):
        run_file.begin_update(version, [f"t{2 * version + place:08d}.1" for place in (0, 1)])
        metrics = {
            "batch/outcome": 0.25 * version,
            "policy/mu": -0.5,
            "batch/overlong": float(version == 1),
            "batch/dropped_messages": 2.0 * version,
            "time/wait_s": 3.0,
            "time/update_s": 1.0,
            "time/sync_s": 0.5,
        }
        run_file.finish_update(version, seeds={}, metrics=metrics, result=b"")
    number = run_file.begin_evaluation(3, ["greedy"], ["game-1"])
    result = ModeResult(
        episodes=200,
        given_up=1,
        success=0.875,
        success_stderr=0.02,
        mean_return=0.8,
        mean_steps=4.5,
    )
    run_file.finish_evaluation(number, msgspec.json.encode({"greedy": result}))
    run_file.close()
    return folder


def row_of(lines: list[str], start: str) -> list[str]:
    [row] = [line for line in lines if line.startswith(start)]
    return row.removeprefix(start).split()


def test_a_report_adds_up(run_dir):
    lines = list(report_lines(run_dir))
    text = "\n".join(lines)
    assert "3 of 3 updates, 9 episodes ended" in text
    assert "too long for the model ended 1 episode(s); 6 message(s) were left out" in text
    assert row_of(lines, "version 3, greedy")[:3] == ["87.5%", "±", "2.0%"]
    assert row_of(lines, "trained on")[:2] == ["6", "66.7%"]
    assert row_of(lines, "stale ")[:2] == ["1", "11.1%"]
    assert row_of(lines, "waiting")[:2] == ["1", "11.1%"]
    assert row_of(lines, "env_error")[:2] == ["1", "11.1%"]
    assert "the stove exploded" in text
    assert row_of(lines, "wait ") == ["9.0", "s", "3.000", "s", "66.7%"]
    assert row_of(lines, "host:1")[:3] == ["9", "9", "39"]
    assert row_of(lines, "below 64")[:3] == ["7", "1", "14.3%"]


def test_the_curve_has_the_means_of_its_updates(run_dir):
    lines = list(report_lines(run_dir))
    start = next(place for place, line in enumerate(lines) if line.startswith("after update"))
    rows = [line.split() for line in lines[start + 2 : start + 5]]
    assert [row[:3] for row in rows] == [
        ["1", "0", "-0.5"],
        ["2", "0.25", "-0.5"],
        ["3", "0.5", "-0.5"],
    ]


def test_a_run_that_has_only_begun_can_be_reported(tmp_path):
    config = to_json(run_config()).decode()
    RunFile.create(tmp_path, {"run_id": "abc", "config": config}).close()
    lines = list(report_lines(tmp_path))
    assert "0 of 10 updates, 0 episodes ended" in lines
    assert list(export_lines(tmp_path)) == []
    with pytest.raises(RunFileError, match="nothing to plot"):
        plot_run(tmp_path, tmp_path / "plot.png")


def test_a_run_whose_prompts_all_fitted_says_nothing_about_it(tmp_path):
    run_file = RunFile.create(tmp_path, {"run_id": "abc", "config": to_json(run_config()).decode()})
    run_file.begin_update(0, [])
    fitted = {"batch/overlong": 0.0, "batch/dropped_messages": 0.0}
    run_file.finish_update(0, seeds={}, metrics=fitted, result=b"")
    run_file.close()
    assert "too long" not in "\n".join(report_lines(tmp_path))


def test_exported_episodes_are_the_recorded_ones(run_dir):
    exported = [json.loads(line) for line in export_lines(run_dir)]
    assert [one["episode_id"] for one in exported] == [f"t{number:08d}.1" for number in range(9)]
    assert [one["consumed_by"] for one in exported] == [0, 0, 1, 1, 2, 2, None, None, None]
    with RunReader(run_dir) as reader:
        [recorded] = reader.read_episodes(["t00000003.1"])
    found = exported[3]
    assert (found["task_id"], found["seed"], found["return"]) == ("game-3", 3, 1.0)
    for step, recorded_step in zip(found["steps"], recorded.steps, strict=True):
        assert step["action"] == recorded_step.action.tolist()
        assert step["observation"] == recorded_step.observation.tolist()
        assert step["versions"] == [[0, 3]]
        logprobs = np.array(step["behaviour_logprobs"], np.float32)
        np.testing.assert_array_equal(logprobs, recorded_step.behaviour_logprobs)


def test_a_plot_is_a_picture(run_dir, tmp_path):
    plot_run(run_dir, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_reports_need_no_torch(run_dir):
    script = f"""
import sys
from pathlib import Path
from capo.learner.report import report_lines
from capo.learner.run_export import export_lines
import capo.learner.replay_text
list(report_lines(Path({str(run_dir)!r}))), list(export_lines(Path({str(run_dir)!r})))
assert not {{"torch", "vllm", "zmq", "transformers"}} & set(sys.modules), "too much was imported"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_columns_are_aligned():
    rows = [("a", "1"), ("bcd", "10,000")]
    assert list(text_table(("name", "count"), rows)) == [
        "name   count",
        "----  ------",
        "a          1",
        "bcd   10,000",
    ]
    assert list(text_table(("name", "count"), [])) == []
