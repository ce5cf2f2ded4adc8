"""A learner of two ranks: it trains, is replayed, loses a rank, and is killed; nothing is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capo.launch.processes import free_port
from capo.learner.tiny_model import build_tokenizer
from tests.chaos import scripted_actor
from tests.chaos.checker import check
from tests.chaos.fleet import CONFIG, settings
from tests.chaos.processes import ROOT, Forked, Spawned, capo
from tests.factories import tiny_policy


def rank_pid(fleet) -> int:
    """Of rank 1, a child of the learner."""
    children = Path(f"/proc/{fleet.learner.pid}/task/{fleet.learner.pid}/children")
    pids = [int(pid) for pid in children.read_text().split()]
    [pid] = [pid for pid in pids if b"rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def gone(pid: int, limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not alive(pid)


def replay(fleet, update: int, *overrides: str) -> str:
    command = ["replay", str(fleet.run_dir), "--update", str(update), *settings(*overrides)]
    process = Forked(fleet.logs / f"replay-{update}{len(overrides)}.log", capo, command)
    assert process.wait(120) == 0, process.tail()
    return process.text()


@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_two_ranks_train_together_and_replay_gives_the_same_bits(start_fleet, zero_stage):
    fleet = start_fleet("learner.ranks=2", f"learner.zero_stage={zero_stage}")
    fleet.add_actor()
    fleet.wait_for_updates(3)
    rank = rank_pid(fleet)
    fleet.learner.signal(signal.SIGINT)
    assert fleet.learner.wait(60) == 130
    assert gone(rank)
    assert "bit for bit" in replay(fleet, 0)
    assert "bit for bit" in replay(fleet, 2)
    assert "algorithm.clip=0.2" in replay(fleet, 2, "algorithm.clip=0.2")


def test_a_learner_that_loses_a_rank_says_which_and_a_resume_goes_on(start_fleet):
    fleet = start_fleet("learner.ranks=2")
    actor = fleet.add_actor()
    fleet.wait_for_updates(3)
    killed = rank_pid(fleet)
    os.kill(killed, signal.SIGKILL)
    assert fleet.learner.wait(20) == 1
    said = fleet.learner.text()
    assert f"rank 1 (pid {killed}) ended with exit code -9" in said
    assert f"--resume {fleet.run_dir}" in said
    assert "Traceback" not in said
    fleet.resume_learner()
    fleet.wait_for_updates(2)
    assert actor.process.exit_code is None  # its engine went on living
    end_and_check(fleet)


def test_a_second_ctrl_c_also_ends_a_learner_whose_rank_does_not_answer(start_fleet):
    fleet = start_fleet("learner.ranks=2")
    fleet.learner.wait_for("listens")
    rank = rank_pid(fleet)
    os.kill(rank, signal.SIGSTOP)
    for _ in range(2):  # the main thread waits for the rank and can handle neither
        time.sleep(1.0)
        fleet.learner.signal(signal.SIGINT)
    assert fleet.learner.wait(20) == 1
    assert "The ranks of this learner do not answer.\n" in fleet.learner.text()
    assert gone(rank)


def test_a_model_that_no_rank_can_use_is_told_as_with_one_rank(tmp_path):
    policy, run_dir, config = tmp_path / "policy", tmp_path / "run", tmp_path / "config.toml"
    build_tokenizer(["go"], tiny_policy(policy))
    described = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps({**described, "logit_scale": 2.0}))
    tiny = re.compile(r"\[model.tiny\].*?\n\n", re.DOTALL)
    config.write_text(tiny.sub(f'path = "{policy}"\n\n', CONFIG.read_text()))
    command = ["learner", str(config), *settings("learner.ranks=2", f'run_dir="{run_dir}"')]
    learner = Forked(tmp_path / "log", capo, command)
    assert learner.wait(60) == 2, learner.text()
    assert "change their logits by logit_scale=2.0" in learner.text()
    assert "rank 1" not in learner.text()
    assert not (run_dir / "run.sqlite").exists()


def test_ranks_end_with_a_learner_that_is_killed_and_a_resume_has_new_ones(start_fleet):
    fleet = start_fleet("learner.ranks=2")
    fleet.add_actor()
    fleet.wait_for_updates(3)
    for phase in ("update", "checkpoint"):
        rank = rank_pid(fleet)
        fleet.kill_learner(phase)
        assert gone(rank)
        fleet.wait_for_updates(2)
    end_and_check(fleet)


def end_and_check(fleet) -> None:
    rank = rank_pid(fleet)
    assert fleet.end() == 130
    assert gone(rank)
    found = check(fleet.run_dir, fleet.logs, batch=12, group_size=1, staleness=1)
    assert not found.faults, str(found)


def test_a_launcher_and_the_configuration_must_agree(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    told = Spawned(tmp_path / "log", "learner", str(CONFIG), *settings("learner.ranks=2"))
    assert told.wait(60) == 2
    assert "the launcher started 3 rank(s), but learner.ranks is 2" in told.text()


@pytest.mark.slow
def test_torchrun_starts_the_ranks_of_a_learner(tmp_path):
    port, run_dir, log = free_port(), tmp_path / "run", tmp_path / "torchrun.log"
    overrides = (
        "learner.ranks=2",
        f'run_dir="{run_dir}"',
        f'network.bind="tcp://127.0.0.1:{port}"',
        "updates=5",
    )
    command = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node=2", "-m"]
    command += ["capo.launch.main", "learner", str(CONFIG), *settings(*overrides)]
    actor = Forked(
        tmp_path / "actor.log",
        scripted_actor.run,
        f"tcp://127.0.0.1:{port}",
        "lone",
        str(tmp_path / "engine"),
        token_s=0.003,
    )
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
        log.write_text(done.stdout + done.stderr)
        assert done.returncode == 0, log.read_text()
        assert "5/5" in done.stdout
        assert actor.wait(30) == 0
    finally:
        actor.kill()
