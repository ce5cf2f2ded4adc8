"""The batch scripts for SLURM, run by bash as SLURM would: its options are comments to bash."""

import os
import signal
import sqlite3
import sys
import time
from pathlib import Path

import pytest

from capo.launch.processes import free_port
from capo.learner.run_reader import RunReader
from tests.chaos.processes import ROOT, Program, Spawned

SCRIPTS = ROOT / "launch"
CHAOS = str(ROOT / "tests" / "chaos" / "chaos.toml")


@pytest.fixture
def start(tmp_path):
    """Starts a job whose `capo` is this checkout's, whose node is this machine."""
    command = tmp_path / "bin" / "capo"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m capo.launch.main "$@"\n')
    command.chmod(0o755)
    keys = tmp_path / "keys"
    made = Spawned(tmp_path / "keygen.log", "keygen", str(keys), "--actors", "2")
    assert made.wait(60) == 0
    jobs: list[Program] = []

    def start_job(name: str, script: str, **environment: str) -> Program:
        common = {"RUN": str(tmp_path / "run"), "KEYS": str(keys), "HOST_ADDRESS": "127.0.0.1"}
        common["PATH"] = f"{command.parent}:{os.environ['PATH']}"
        bash = ["bash", str(SCRIPTS / script)]
        jobs.append(Program(tmp_path / f"{name}.log", bash, common | environment))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.kill()


def test_the_first_job_of_a_chain_begins_the_run_and_the_next_goes_on(start, tmp_path):
    first = start(
        "first",
        "learner.sbatch",
        CONFIG=CHAOS,
        PORT=str(free_port()),
        EXTRA="--set updates=77 --set learner.batch_episodes=6",
    )
    first.wait_for("listens", timeout_s=120)
    first.wait_for("starting policy", timeout_s=120)
    first.signal(signal.SIGUSR1)
    assert first.wait(60) == 130, first.text()
    assert "Actors wait with their engines" in first.text()
    assert f"capo learner --resume {tmp_path / 'run'}" in first.text()
    second = start("second", "learner.sbatch", PORT=str(free_port()))
    second.wait_for("listens", timeout_s=120)
    with RunReader(tmp_path / "run") as reader:
        config = reader.config()
    assert (config.updates, config.learner.batch_episodes) == (77, 6)


@pytest.mark.parametrize("script", ["learner.sbatch", "actors.sbatch"])
@pytest.mark.parametrize("missing", ["RUN", "KEYS"])
def test_what_is_missing_is_named(start, script, missing):
    job = start(f"{script}-{missing}", script, **{missing: ""})
    assert job.wait(30) != 0
    assert missing in job.text()


def test_an_environment_without_capo_is_told(start, tmp_path):
    (tmp_path / "bin" / "capo").unlink()
    job = start("without", "learner.sbatch", PATH="/usr/bin:/bin")
    assert job.wait(30) == 2
    assert "activate its environment" in job.text()


@pytest.mark.slow
def test_an_engine_outlives_the_jobs_of_its_learner(start, tmp_path):
    actor = start("actor", "actors.sbatch", SLURM_ARRAY_TASK_ID="1")
    wider = "--set model.tiny.head_dim=32"  # vLLM's attention on CPUs asks for it
    first = start("first", "learner.sbatch", CONFIG=CHAOS, PORT=str(free_port()), EXTRA=wider)
    wait_for_updates(tmp_path / "run", 3)
    first.signal(signal.SIGUSR1)
    assert first.wait(60) == 130
    second = start("second", "learner.sbatch", PORT=str(free_port()))
    wait_for_updates(tmp_path / "run", 6)
    assert actor.exit_code is None
    second.signal(signal.SIGTERM)
    assert second.wait(60) == 130
    assert actor.wait(60) == 0, actor.text()


def wait_for_updates(run_dir: Path, count: int, limit_s: float = 240.0) -> None:
    deadline = time.monotonic() + limit_s
    while updates(run_dir) < count:
        assert time.monotonic() < deadline, f"no update {count} in {limit_s} s"
        time.sleep(0.2)


def updates(run_dir: Path) -> int:
    if not (run_dir / "run.sqlite").exists():
        return 0
    with sqlite3.connect(f"file:{run_dir / 'run.sqlite'}?mode=ro", uri=True) as database:
        try:
            return len(database.execute("SELECT 1 FROM updates WHERE status = 'done'").fetchall())
        except sqlite3.OperationalError:  # it is being made
            return 0
