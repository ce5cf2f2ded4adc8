"""The main job through real processes: a learner, an actor, a second actor that comes and leaves.

One run serves all tests here; it starts two vLLM engines and takes minutes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from capo.launch.outcome import evaluations_of
from capo.launch.processes import free_port
from capo.learner.metrics_log import read_metrics
from capo.learner.run_reader import RunReader

ROOT = Path(__file__).parents[2]
UPDATES = 60
GAMES = 100


@dataclass(frozen=True)
class Finished:
    run_dir: Path
    learner_output: str
    visitor_output: str
    visitor_code: int
    attached_at: int  # updates done when the second actor was started


class Process:
    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.log = folder / f"{name}.log"
        self._output = self.log.open("wb")
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "capo.launch.main", *arguments],
            cwd=ROOT,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CAPO_CACHE": str(folder / "cache")},
        )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, condition: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while condition not in self.text():
            assert self.popen.poll() is None, f"ended early:\n{self.text()[-3000:]}"
            assert time.monotonic() < deadline, f"no {condition!r} in:\n{self.text()[-3000:]}"
            time.sleep(0.2)

    def end(self) -> None:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()
        self._output.close()


def updates_done(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    folder = tmp_path_factory.mktemp("main-job")
    run_dir = folder / "run"
    address = f"tcp://127.0.0.1:{free_port()}"
    settings = [
        f'run_dir="{run_dir}"',
        f'network.bind="{address}"',
        f"updates={UPDATES}",
        f"evaluation.games={GAMES}",
        "checkpoint.every=20",
    ]
    overrides = [word for setting in settings for word in ("--set", setting)]
    learner = Process(folder, "learner", "learner", "configs/quickstart.toml", *overrides)
    resident = Process(folder, "resident", "actor", "--connect", address, "--name", "resident")
    processes = [learner, resident]
    try:
        learner.wait_for("listens", 120)
        learner.wait_for("Evaluation at version 0", 300)
        attached_at = updates_done(run_dir)
        visitor = Process(folder, "visitor", "actor", "--connect", address, "--name", "visitor")
        processes.append(visitor)
        visitor.wait_for("playing", 180)
        time.sleep(5.0)
        visitor.popen.send_signal(signal.SIGINT)
        code = visitor.popen.wait(60)
        assert learner.popen.wait(600) == 0, learner.text()[-3000:]
        assert resident.popen.wait(60) == 0, resident.text()[-3000:]
        yield Finished(run_dir, learner.text(), visitor.text(), code, attached_at)
    finally:
        for process in processes:
            process.end()


def test_success_on_held_out_games_rises(finished: Finished) -> None:
    with RunReader(finished.run_dir) as reader:
        (first, before), (last, after) = evaluations_of(reader)
    assert (first, last) == (0, UPDATES)
    assert before["sampled"].episodes == after["sampled"].episodes == GAMES
    spread = (before["sampled"].success_stderr ** 2 + after["sampled"].success_stderr ** 2) ** 0.5
    assert after["sampled"].success > before["sampled"].success + spread


def test_every_update_trained_its_episodes_once_and_whole(finished: Finished) -> None:
    with RunReader(finished.run_dir) as reader:
        updates = reader.updates()
        episodes = {row.episode_id: row for row in reader.episodes()}
    assert [update.version for update in updates] == list(range(UPDATES))
    trained = [episode_id for update in updates for episode_id in update.episode_ids]
    assert len(trained) == len(set(trained)) == UPDATES * 48
    for update in updates:
        assert update.status == "done"
        for episode_id in update.episode_ids:
            row = episodes[episode_id]
            assert row.status in ("terminated", "truncated")
            assert row.excluded == ""
            assert row.min_version is not None
            assert update.version - row.min_version <= 1


def test_an_actor_attached_in_the_middle_is_trained_on_and_leaves_in_order(
    finished: Finished,
) -> None:
    with RunReader(finished.run_dir) as reader:
        (visitor,) = [actor for actor in reader.actors() if actor.name == "visitor"]
        episodes = [row for row in reader.episodes() if row.actor_id == visitor.actor_id]
        leases = [row for row in reader.leases() if row.actor_id == visitor.actor_id]
    assert any(row.consumed_by is not None for row in episodes)
    assert all(row.min_version is None or row.min_version > 0 for row in episodes)
    assert all(row.status != "playing" for row in leases)
    assert finished.visitor_code == 0
    assert "visitor joined" in finished.learner_output
    assert "visitor is gone" in finished.learner_output


def test_weights_were_proved_in_the_engines_after_every_update(finished: Finished) -> None:
    rows = read_metrics(finished.run_dir)
    assert len(rows) == UPDATES
    assert all(row["sync/engines"] >= 1 for row in rows)
    assert any(row["sync/engines"] == 2 for row in rows)
    assert max(row["sync/probe_gap_max"] for row in rows) < 1e-4


def test_rollout_and_update_overlap(finished: Finished) -> None:
    rows = read_metrics(finished.run_dir)
    assert max(row["staleness/mean"] for row in rows) > 0
    assert all({"time/wait_s", "time/update_s", "time/sync_s"} <= row.keys() for row in rows)


def test_any_update_is_replayed_bit_for_bit(finished: Finished) -> None:
    version = UPDATES - 2
    command = [sys.executable, "-m", "capo.launch.main", "replay", str(finished.run_dir)]
    done = subprocess.run(
        [*command, "--update", str(version)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit" in done.stdout


def test_checkpoints_are_loaded_by_transformers_as_they_are(finished: Finished) -> None:
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForTokenClassification,
        AutoTokenizer,
    )

    newest = sorted((finished.run_dir / "checkpoints").glob("version-*"))[-1]
    policy = AutoModelForCausalLM.from_pretrained(newest / "policy")
    critic = AutoModelForTokenClassification.from_pretrained(newest / "critic")
    tokenizer = AutoTokenizer.from_pretrained(newest / "policy")
    assert policy.config.vocab_size == len(tokenizer)
    assert critic.config.num_labels == 1


def test_the_output_is_a_table_of_updates_and_of_held_out_games(finished: Finished) -> None:
    assert f"{UPDATES}/{UPDATES}" in finished.learner_output
    assert "Held-out games" in finished.learner_output
    assert "Traceback" not in finished.learner_output
    assert "Warning" not in finished.learner_output


@pytest.mark.slow
def test_capo_run_goes_on_after_its_learner_was_killed(tmp_path: Path) -> None:
    """With the actors that it starts itself, and their vLLM engines."""
    run_dir = tmp_path / "run"
    settings = [
        f'run_dir="{run_dir}"',
        "updates=12",
        "checkpoint.every=4",
        "evaluation.before=false",
        "evaluation.games=20",
    ]
    overrides = [word for setting in settings for word in ("--set", setting)]
    first = Process(tmp_path, "first", "run", "configs/quickstart.toml", *overrides)
    try:
        deadline = time.monotonic() + 300
        while updates_done(run_dir) < 6:
            assert first.popen.poll() is None, first.text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        learner = json.loads((run_dir / "learner.json").read_text())["pid"]
        os.kill(learner, signal.SIGKILL)
        assert first.popen.wait(120) != 0
        assert f"go on with capo run --resume {run_dir}" in first.text()
    finally:
        first.end()
    second = Process(tmp_path, "second", "run", "--resume", str(run_dir))
    try:
        assert second.popen.wait(300) == 0, second.text()[-3000:]
    finally:
        second.end()
    assert "Going on from the checkpoint of version" in second.text()
    with RunReader(run_dir) as reader:
        updates = reader.updates()
        [(version, results)] = evaluations_of(reader)
    assert [update.status for update in updates] == ["done"] * 12
    assert (version, results["sampled"].episodes) == (12, 20)
    assert [row["version"] for row in read_metrics(run_dir)] == list(range(1, 13))
