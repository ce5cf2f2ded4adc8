"""The disk fills up while a run trains: it waits, says so, and goes on when there is room."""

import contextlib
import signal
import subprocess
import time
from pathlib import Path

import pytest

from capo.learner.metrics_log import read_metrics
from capo.learner.status_file import read_status
from tests.chaos.checker import check

SIZE_MIB = 96  # a log of 64 MiB before SQLite folds it in, and some room


@pytest.fixture
def small_disk(tmp_path: Path):
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "none", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Until not a page is left."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return ballast


def test_the_run_waits_for_room_says_so_and_goes_on(start_fleet, small_disk):
    fleet = start_fleet(f'run_dir="{small_disk / "run"}"')
    fleet.run_dir = small_disk / "run"
    fleet.add_actor()
    fleet.add_actor()
    fleet.wait_for_updates(3, limit_s=60)
    ballast = fill(small_disk)
    fleet.learner.wait_for("The run waits for room on the disk")
    fill(small_disk)
    fleet.wait(
        lambda: read_status(fleet.run_dir).doing.startswith("waits for room"), "the status says it"
    )
    stuck = fleet.updates()
    newcomer = fleet.add_actor()  # comes while nothing can be written
    time.sleep(4.0)
    fleet.look()
    assert fleet.updates() <= stuck + 1
    assert "pauses: " in "".join(actor.process.text() for actor in fleet.actors)
    ballast.unlink()
    fleet.wait_for_updates(4)
    assert "There is room on the disk again; the run goes on." in fleet.learner.text()
    fleet.wait(
        lambda: (newcomer.name,) in fleet.query("SELECT name FROM actors"), "the newcomer is named"
    )
    assert fleet.end() == 130
    versions = [line["version"] for line in read_metrics(fleet.run_dir)]
    assert versions == list(range(1, fleet.updates() + 1))
    found = check(fleet.run_dir, fleet.logs, batch=12, group_size=1, staleness=1)
    assert found.faults == []
    assert "Traceback" not in fleet.learner.text()


def test_a_stop_does_not_wait_for_room(start_fleet, small_disk):
    fleet = start_fleet(f'run_dir="{small_disk / "run"}"')
    fleet.run_dir = small_disk / "run"
    actor = fleet.add_actor()
    fleet.wait_for_updates(3, limit_s=60)
    ballast = fill(small_disk)
    fleet.learner.wait_for("The run waits for room on the disk")
    fleet.learner.signal(signal.SIGINT)
    assert fleet.learner.wait(90) == 130
    assert "Traceback" not in fleet.learner.text()
    actor.process.kill()
    fleet.actors.clear()
    ballast.unlink()
    fleet.learner = fleet._start_learner()
    fleet.add_actor()
    fleet.wait_for_updates(2)
    fleet.wait(fleet.settled, "the leases of the killed actor were given to others")
    assert fleet.end() == 130
    found = check(fleet.run_dir, fleet.logs, batch=12, group_size=1, staleness=1)
    assert found.faults == []
