"""RUN/status.json: what is said of a learner, also when its disk is full or it is gone."""

import contextlib
import subprocess

import pytest

from capo.learner.scheduler_status import SchedulerStatus, Wait
from capo.learner.status_file import (
    ActorStatus,
    LearnerStatus,
    read_status,
    status_lines,
    write_status,
)
from capo.protocol.errors import RunFileError


def status(doing: str = "waits for the batch of version 3", **changes) -> LearnerStatus:
    scheduler = SchedulerStatus(
        version=3,
        batches=3,
        playing={"ann": 2},
        waiting=1,
        buffered=4,
        evaluation_done=0,
        evaluation_total=0,
        counts={},
        last_error="the kitchen burns",
        waits=(Wait(who="the learner", whom="batch", since_s=7.0),),
    )
    actor = ActorStatus(
        actor_id="ann",
        name="ann",
        ready=True,
        weights_version=3,
        playing=2,
        capacity=4,
        waiting_for="leases",
        connected_s=60.0,
        silent_s=9.0,
        metrics={},
    )
    fields = {"written_at": 1000.0, "pid": 7, "doing_s": 8.0, "actors": (actor,)}
    return LearnerStatus(doing=doing, scheduler=scheduler, **(fields | changes))


def test_it_names_who_waits_for_whom_and_since_when():
    text = "\n".join(status_lines(status(), now=1001.0))
    assert "learner: waits for the batch of version 3 for 8.0 s, version 3" in text
    assert "the learner waits for batch for 7.0 s" in text
    assert "actor ann: ready, weights of version 3, plays 2 of 4" in text
    assert "silent for 9 s, waits for leases" in text
    assert "last error: the kitchen burns" in text
    assert "has not reported" not in text


def test_an_old_status_says_so_first():
    assert "pid 7) has not reported for 20 s" in status_lines(status(), now=1020.0)[0]


def test_what_is_not_there_or_damaged_is_one_sentence(tmp_path):
    with pytest.raises(RunFileError, match=r"no status.json"):
        read_status(tmp_path)
    (tmp_path / "status.json").write_text("{")
    with pytest.raises(RunFileError, match="cannot be read"):
        read_status(tmp_path)


def test_on_a_full_disk_it_goes_on_telling(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        write_status(folder, status("waits for the batch"))
        with contextlib.suppress(OSError):
            (folder / "ballast").write_bytes(bytes(1 << 20))
        write_status(folder, status("waits for room on the disk"))
        assert read_status(folder).doing == "waits for room on the disk"
        assert [path.name for path in folder.glob("status*")] == ["status.json"]
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
