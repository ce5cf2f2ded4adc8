"""A learner that is killed comes back to a real engine: the same process, with new weights."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from capo.launch.processes import free_port
from capo.learner.metrics_log import read_metrics
from tests.chaos.fleet import CONFIG, ROOT

pytestmark = pytest.mark.slow
UPDATES_EACH = 2


class Process:
    """`capo ...` with its output in a file; killed with all that it started."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CAPO_CACHE": str(log.parent / "cache"),
        }
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "capo.launch.main", *arguments],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )

    def kill(self) -> None:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()

    def text(self) -> str:
        return self.log.read_text(errors="replace")


def descendants(pid: int) -> set[int]:
    """All processes that this one started, and theirs."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= more
    return found


def wait(
    condition: Callable[[], bool], what: str, processes: list[Process], limit_s: float
) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        story = "\n".join(one.text()[-1500:] for one in processes)
        assert all(one.popen.poll() is None for one in processes), f"one ended:\n{story}"
        assert time.monotonic() < deadline, f"waited {limit_s} s until {what}:\n{story}"
        time.sleep(0.2)


def test_a_killed_learner_finds_the_same_engine_again(tmp_path):
    run_dir = tmp_path / "run"
    address = f"tcp://127.0.0.1:{free_port()}"
    bind = ["--set", f'network.bind="{address}"']
    settings = ["--set", f'run_dir="{run_dir}"', "--set", "rollout.enforce_eager=true"]
    settings += ["--set", "model.tiny.head_dim=32", "--set", "weight_sync.join_timeout_s=30.0"]
    settings += [
        "--set",
        "weight_sync.transfer_timeout_s=30.0",
        "--set",
        "network.dead_after_s=15.0",
    ]
    learner = Process(tmp_path / "learner.log", "learner", str(CONFIG), *settings, *bind)
    actor = Process(tmp_path / "actor.log", "actor", "--connect", address, "--name", "resident")
    try:
        processes = [learner, actor]
        wait(lambda: len(read_metrics(run_dir)) >= UPDATES_EACH, "updates", processes, 300)
        engine = descendants(actor.popen.pid)
        assert engine
        before = len(read_metrics(run_dir))
        learner.kill()
        time.sleep(1.0)
        assert actor.popen.poll() is None
        learner = Process(tmp_path / "learner.log", "learner", "--resume", str(run_dir), *bind)
        processes = [learner, actor]
        goal = before + UPDATES_EACH
        wait(
            lambda: any(line["version"] >= goal for line in read_metrics(run_dir)),
            "updates after the kill",
            processes,
            240,
        )
        assert descendants(actor.popen.pid) == engine
        assert "resident is back" in learner.text()
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["sync/engines"] == 1
        assert lines[-1]["sync/probe_gap_max"] < 1e-3
        assert [line["version"] for line in lines] == list(range(1, len(lines) + 1))
        learner.popen.send_signal(signal.SIGINT)
        assert learner.popen.wait(120) == 130
        assert actor.popen.wait(60) == 0
    finally:
        learner.kill()
        actor.kill()
