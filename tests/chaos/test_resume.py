"""A run that was killed and goes on is the run that was never disturbed."""

import hashlib
import shutil
import time
from pathlib import Path

import pytest

from capo.launch.processes import free_port
from capo.learner.metrics_log import read_metrics
from tests.chaos.fleet import CONFIG, Fleet
from tests.chaos.processes import Forked, capo
from tests.metrics_page import missing, undescribed

UPDATES = 6
SYNCHRONOUS = (f"updates={UPDATES}", "scheduler.max_staleness=0", "checkpoint.keep_last=9")


def tensors(run_dir: Path, version: int) -> dict[str, str]:
    """Digests of weights and optimizer state, by file."""
    folder = run_dir / "checkpoints" / f"version-{version:06d}"
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.safetensors"))
    }


def finish(fleet: Fleet) -> None:
    assert fleet.learner.wait(120) == 0, fleet.learner.tail()
    for actor in fleet.actors:
        assert actor.process.wait(60) == 0, actor.process.tail()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The run directory of a synchronous run that nobody disturbed."""
    with Fleet(tmp_path_factory.mktemp("undisturbed"), 0, SYNCHRONOUS) as fleet:
        fleet.add_actor()
        finish(fleet)
    return fleet.run_dir


def test_the_page_of_metrics_describes_what_a_real_run_writes_and_nothing_else(undisturbed):
    rows = read_metrics(undisturbed)
    assert len(rows) == UPDATES
    names = {name for row in rows for name in row}
    assert undescribed(names) == {"version", "time"}
    assert missing(names) <= {
        *("mismatch/k1/stale", "mismatch/k3/stale", "actors/busy_fraction"),
        *("staleness/discarded_tokens_mean", "staleness/discarded_tokens_max"),
    }
    for row in rows:
        assert 0.0 <= row["queue/age_s_mean"] <= row["queue/age_s_max"] < 60.0
        assert row["queue/age_versions_max"] == 0.0  # synchronous
        assert row["staleness/versions_per_episode_max"] == 1.0
        assert 0.0 < row["system/idle_fraction"] <= 1.0
        assert row["batch/overlong"] == row["batch/dropped_messages"] == 0.0


@pytest.mark.parametrize("phase", ["ingest", "update", "checkpoint", "broadcast"])
def test_a_killed_run_reaches_the_same_weights_bit_for_bit(undisturbed, start_fleet, phase):
    fleet = start_fleet(*SYNCHRONOUS)
    fleet.add_actor()
    fleet.add_actor()
    fleet.wait_for_updates(1)
    fleet.kill_learner(phase)
    finish(fleet)
    assert fleet.resumes == 1
    for version in range(2, UPDATES + 1, 2):
        assert tensors(fleet.run_dir, version) == tensors(undisturbed, version)
    assert len(tensors(undisturbed, UPDATES)) == 4


def test_killed_before_its_first_checkpoint_it_goes_on_too(undisturbed, start_fleet):
    fleet = start_fleet(*SYNCHRONOUS)
    fleet.add_actor()
    fleet.wait(lambda: bool(fleet.query("SELECT 1 FROM episodes")), "an episode has ended")
    fleet.learner.kill()
    assert not (fleet.run_dir / "checkpoints").exists()
    fleet.learner = fleet._start_learner()
    finish(fleet)
    assert tensors(fleet.run_dir, UPDATES) == tensors(undisturbed, UPDATES)


def test_a_torn_checkpoint_is_refused_by_name_and_the_one_before_used(undisturbed, start_fleet):
    fleet = start_fleet(*SYNCHRONOUS)
    fleet.add_actor()
    fleet.wait_for_updates(5)
    fleet.learner.kill()
    newest = sorted((fleet.run_dir / "checkpoints").glob("version-??????"))[-1]
    torn = newest / "policy" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    fleet.learner = fleet._start_learner()
    finish(fleet)
    text = fleet.learner.text()
    assert f"The checkpoint {newest} is torn: policy/model.safetensors is missing or cut" in text
    version = int(newest.name.removeprefix("version-"))
    assert f"Going on from the checkpoint of version {version - 2}." in text
    assert tensors(fleet.run_dir, UPDATES) == tensors(undisturbed, UPDATES)


def test_ctrl_c_drains_saves_and_the_run_goes_on_from_there(undisturbed, start_fleet):
    fleet = start_fleet(*SYNCHRONOUS)
    fleet.add_actor()
    fleet.wait_for_updates(3)
    assert fleet.end() == 130
    done = fleet.updates()
    assert f"Stopped after update {done} of {UPDATES}" in fleet.learner.text()
    assert tensors(fleet.run_dir, done) != {}
    fleet.actors.clear()
    fleet.learner = fleet._start_learner()
    fleet.add_actor()
    finish(fleet)
    assert f"Going on from the checkpoint of version {done}." in fleet.learner.text()
    assert tensors(fleet.run_dir, UPDATES) == tensors(undisturbed, UPDATES)


def test_actors_outlive_their_learner_and_reconnect(start_fleet):
    fleet = start_fleet()
    actors = [fleet.add_actor(), fleet.add_actor()]
    fleet.wait_for_updates(2)
    before = [actor.process.pid for actor in actors]
    fleet.learner.kill()
    time.sleep(4.0)
    fleet.learner = fleet._start_learner()
    fleet.wait_for_updates(3)
    names = {name for (name,) in fleet.query("SELECT name FROM actors")}
    assert names == {actor.name for actor in actors}  # the same ones, nobody new
    assert [actor.process.pid for actor in actors] == before
    for actor in actors:
        assert f"{actor.name} is back." in fleet.learner.text()
    assert fleet.end() == 130


def test_capo_run_resume_continues_the_same_run(undisturbed, tmp_path, start_fleet):
    fleet = start_fleet(*SYNCHRONOUS)
    fleet.add_actor()
    fleet.wait_for_updates(2)
    fleet.learner.kill()
    fleet.actors.pop().process.kill()
    port = free_port()
    run = Forked(
        tmp_path / "run.log",
        capo,
        [
            *("run", "--resume", str(fleet.run_dir), "--actors", "0"),
            *("--set", f'network.bind="tcp://127.0.0.1:{port}"'),
        ],
    )
    try:
        fleet._port = port
        fleet.add_actor()
        assert run.wait(240) == 0, run.tail()
    finally:
        run.kill()
    assert tensors(fleet.run_dir, UPDATES) == tensors(undisturbed, UPDATES)


def test_a_run_whose_file_lost_its_end_does_not_go_on_without_it(start_fleet, tmp_path):
    fleet = start_fleet()
    fleet.add_actor()
    fleet.wait_for_updates(3)
    fleet.learner.kill()
    copy = tmp_path / "copy"
    shutil.copytree(fleet.run_dir, copy, ignore=shutil.ignore_patterns("*-wal"))
    before = (copy / "metrics.jsonl").read_bytes()
    resumed = Forked(tmp_path / "copy.log", capo, ["learner", "--resume", str(copy)])
    assert resumed.wait(60) == 2
    assert "its end is missing, as in a copy without run.sqlite-wal" in resumed.text()
    assert (copy / "metrics.jsonl").read_bytes() == before


def test_a_log_of_metrics_that_a_power_cut_left_is_whole_again(start_fleet):
    fleet = start_fleet("updates=6")
    fleet.add_actor()
    fleet.wait_for_updates(3)
    fleet.learner.kill()
    log = fleet.run_dir / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:-300] + bytes(299) + b"\n")  # what was not synced is zeros
    fleet.learner = fleet._start_learner()
    finish(fleet)
    assert [row["version"] for row in read_metrics(fleet.run_dir)] == [1, 2, 3, 4, 5, 6]


def test_two_learners_of_one_run_are_refused(start_fleet):
    fleet = start_fleet()
    fleet.learner.wait_for("listens")
    second = Forked(fleet.logs / "second.log", capo, ["learner", "--resume", str(fleet.run_dir)])
    assert second.wait(60) == 2
    assert f"in use by another learner (process {fleet.learner.pid})" in second.text()
    run = Forked(fleet.logs / "run.log", capo, ["run", "--resume", str(fleet.run_dir)])
    assert run.wait(60) == 2
    assert f"in use by another learner (process {fleet.learner.pid})" in run.text()
    assert not (fleet.run_dir / "logs").exists()  # no actor was started that would have joined it


def test_a_run_that_was_begun_is_not_begun_again(start_fleet):
    fleet = start_fleet()
    fleet.learner.wait_for("listens")
    fleet.learner.kill()
    size = (fleet.run_dir / "run.sqlite").stat().st_size
    again = Forked(
        fleet.logs / "again.log",
        capo,
        ["learner", str(CONFIG), "--set", f'run_dir="{fleet.run_dir}"'],
    )
    assert again.wait(60) == 2
    assert "already holds a run: continue it with --resume" in again.text()
    assert (fleet.run_dir / "run.sqlite").stat().st_size == size
