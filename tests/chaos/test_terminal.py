"""A terminal or a pipe that is closed while a run goes on: nobody is left behind, nothing lost."""

import os
import signal
import time
from pathlib import Path

from capo.learner.checkpoint import Checkpoints
from tests.chaos.fleet import CONFIG, settings
from tests.chaos.processes import Forked, Spawned, capo


def speak_to_nobody(arguments: list[str]) -> int:
    """`capo` whose reader has left before its first word."""
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
    return capo(arguments)


def test_a_learner_whose_reader_left_trains_to_the_end(start_fleet):
    fleet = start_fleet()
    fleet.learner.wait_for("listens")
    fleet.learner.kill()
    chosen = settings("updates=4", f'network.bind="{fleet.address}"')
    fleet.learner = Forked(
        fleet.logs / "unheard.log",
        speak_to_nobody,
        ["learner", "--resume", str(fleet.run_dir), *chosen],
    )
    actor = fleet.add_actor()
    assert fleet.learner.wait(120) == 0, fleet.learner.tail()
    assert actor.process.wait(60) == 0
    assert fleet.updates() == 4
    assert fleet.learner.text() == ""


def test_the_end_of_its_terminal_stops_a_learner_in_order(start_fleet):
    fleet = start_fleet()
    actor = fleet.add_actor()
    fleet.wait_for_updates(3)
    for _ in range(3):  # the kernel says so, and the shell once more
        fleet.learner.signal(signal.SIGHUP)
        time.sleep(0.02)
    assert fleet.learner.wait(120) == 130, fleet.learner.tail()
    assert actor.process.wait(60) == 0
    assert f"Stopped after update {fleet.updates()} of" in fleet.learner.text()
    assert Checkpoints(fleet.run_dir, keep_last=2).open(fleet.updates())


def test_capo_run_leaves_nobody_behind_when_its_terminal_is_closed(tmp_path, monkeypatch):
    monkeypatch.setenv("CAPO_CACHE", str(tmp_path / "cache"))
    window, terminal = os.openpty()
    running = Spawned(
        tmp_path / "run.log",
        *("run", str(CONFIG), *settings(f'run_dir="{tmp_path / "run"}"')),
        terminal=terminal,
    )
    os.close(terminal)
    try:
        shown = b""
        while b"listens" not in shown:
            shown += os.read(window, 4096)
        started = running.descendants()
        assert len(started) >= 2  # a learner and an actor
        os.close(window)
        assert running.wait(120) == 130
        assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    finally:
        running.kill()
