"""The metrics' two logs, and what a resumed run takes back."""

import contextlib
import json
import math
import subprocess

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from capo.learner.metrics_log import MetricsLog, read_metrics
from capo.learner.run_tables import UpdateRow
from capo.protocol.errors import StorageFullError


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path):
    with MetricsLog(tmp_path, clock=lambda: 12.5) as log:
        log.write(1, {"loss": 0.25, "variance": math.nan})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[0]) == {
            "version": 1,
            "time": 12.5,
            "loss": 0.25,
            "variance": None,
        }


def test_tensorboard_gets_the_same_numbers(tmp_path):
    with MetricsLog(tmp_path) as log:
        for version in (1, 2):
            log.write(version, {"ratio/mu": version / 4})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("ratio/mu")] == [
        (1, 0.25),
        (2, 0.5),
    ]


def done(version: int, loss: float) -> UpdateRow:
    """The run file's row of the update that made policy `version`."""
    return UpdateRow(version - 1, "done", (), {}, {"loss": loss}, 10.0, 20.0 + version)


@pytest.mark.parametrize("resume_at", [0, 2])  # 0: before the first checkpoint
def test_a_resumed_run_takes_back_what_it_will_write_again(tmp_path, resume_at):
    with MetricsLog(tmp_path) as log:
        for version in (1, 2, 3, 4):
            log.write(version, {"loss": float(version)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"version": 5, "lo')  # the crash
    past = [done(version, float(version)) for version in range(1, resume_at + 1)]
    again = resume_at + 1
    with MetricsLog(tmp_path, past) as log:
        log.write(again, {"loss": 30.0})
    before = [float(version) for version in range(1, again)]
    assert [line["version"] for line in read_metrics(tmp_path)] == list(range(1, again + 1))
    assert [line["loss"] for line in read_metrics(tmp_path)] == [*before, 30.0]
    events = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == [*before, 30.0]


@pytest.mark.parametrize("left", [None, b"", bytes(300) + b"\n", b'{"version": 1}\n[]\n\xff\n'])
def test_whatever_became_of_the_file_a_resumed_run_has_all_lines(tmp_path, left):
    if left is not None:
        (tmp_path / "metrics.jsonl").write_bytes(left)
    with MetricsLog(tmp_path, [done(1, 0.5), done(2, math.nan)], clock=lambda: 90.0) as log:
        log.write(3, {"loss": 0.25})
    assert read_metrics(tmp_path) == [
        {"version": 1, "time": 21.0, "loss": 0.5},
        {"version": 2, "time": 22.0, "loss": None},
        {"version": 3, "time": 90.0, "loss": 0.25},
    ]


@pytest.mark.parametrize("text", ["", '{"version": 1, "loss": 2.0}\n{"versi'])
def test_a_line_in_the_making_is_not_read(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text(text)
    assert len(read_metrics(tmp_path)) == text.count("\n")
    assert read_metrics(tmp_path / "nowhere") == []


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)], capture_output=True
    )
    if mount.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_takes_nothing_or_all_and_goes_on_with_room(small_disk):
    ballast = small_disk / "ballast"
    metrics = {f"metric/{number}": float(number) for number in range(100)}
    with MetricsLog(small_disk) as log:
        log.write(1, metrics)
        with contextlib.suppress(OSError):
            ballast.write_bytes(bytes(1 << 20))
        version = 2
        with contextlib.suppress(StorageFullError):
            while True:
                log.write(version, metrics)
                version += 1
        with pytest.raises(StorageFullError, match="make room"):
            log.write(version, metrics)
        ballast.unlink()
        log.write(version, metrics)
        log.write(version + 1, metrics)
    expected = list(range(1, version + 2))
    assert [line["version"] for line in read_metrics(small_disk)] == expected
    events = EventAccumulator(str(small_disk / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("metric/7")] == expected
