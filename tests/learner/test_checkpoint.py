"""Checkpoints: whole or not there, and a torn one is never used."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from capo.learner.checkpoint import MANIFEST, Checkpoints
from capo.protocol.errors import CheckpointError, StorageFullError


def contents(text: str):
    """What Trainer.save does, as far as a checkpoint knows: files in folders."""

    def write(folder: Path) -> None:
        (folder / "policy").mkdir()
        (folder / "policy" / "model.safetensors").write_text(text * 100)
        (folder / "trainer.json").write_text(text)

    return write


def save_all(checkpoints: Checkpoints, *versions: int) -> None:
    for version in versions:
        checkpoints.save(version, contents(f"v{version}"))


def test_what_was_saved_is_found_again(tmp_path):
    checkpoints = Checkpoints(tmp_path, 3)
    assert checkpoints.latest() is None
    saved = checkpoints.save(25, contents("weights"))
    assert saved.folder == tmp_path / "checkpoints" / "version-000025"
    found = Checkpoints(tmp_path, 3).latest()
    assert (found.version, found.digest, found.refused) == (25, saved.digest, ())
    assert (found.folder / "trainer.json").read_text() == "weights"
    assert checkpoints.versions() == [25]


def test_the_digest_is_of_the_content(tmp_path):
    digests = [
        Checkpoints(tmp_path / str(place), 1).save(1, contents(text)).digest
        for place, text in enumerate(("same", "same", "other"))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, 2)
    save_all(checkpoints, 10, 20, 30)
    assert checkpoints.versions() == [20, 30]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["version-000020", "version-000030"]


def test_nearest_before_is_of_the_same_version_or_older(tmp_path):
    checkpoints = Checkpoints(tmp_path, 9)
    save_all(checkpoints, 10, 20, 30)
    assert checkpoints.nearest_before(20).version == 20
    assert checkpoints.nearest_before(29).version == 20
    assert checkpoints.nearest_before(9) is None
    with pytest.raises(CheckpointError, match="no checkpoint of version 15; there are: 10, 20, 30"):
        checkpoints.open(15)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: (folder / "trainer.json").unlink(), "trainer.json is missing"),
        (lambda folder: (folder / "trainer.json").write_text("v"), "cut short"),
        (lambda folder: (folder / "trainer.json").write_text("vX"), "not what was written"),
        (lambda folder: (folder / MANIFEST).unlink(), "manifest is missing"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "manifest is missing or damaged"),
    ],
)
def test_a_torn_checkpoint_is_refused_and_the_one_before_used(tmp_path, damage, sentence):
    checkpoints = Checkpoints(tmp_path, 3)
    save_all(checkpoints, 1, 2)
    damage(tmp_path / "checkpoints" / "version-000002")
    found = checkpoints.latest()
    assert found.version == 1
    assert len(found.refused) == 1
    assert sentence in found.refused[0]
    with pytest.raises(CheckpointError, match=sentence):
        checkpoints.open(2)
    checkpoints.save(2, contents("v2"))  # the resumed run writes it anew
    assert checkpoints.latest().version == 2


def test_when_all_are_torn_nothing_is_used_silently(tmp_path):
    checkpoints = Checkpoints(tmp_path, 3)
    save_all(checkpoints, 1)
    (tmp_path / "checkpoints" / "version-000001" / "trainer.json").unlink()
    with pytest.raises(CheckpointError, match=r"No checkpoint .* can be used: .*trainer.json"):
        checkpoints.latest()


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path, 3)
    save_all(checkpoints, 1)
    root = tmp_path / "checkpoints"
    (root / "version-000001").rename(root / "version-000007")
    with pytest.raises(CheckpointError, match="is of version 1"):
        checkpoints.open(7)


def test_a_writer_that_fails_leaves_what_was_there(tmp_path):
    checkpoints = Checkpoints(tmp_path, 3)
    save_all(checkpoints, 1)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        checkpoints.save(2, fail)
    assert os.listdir(tmp_path / "checkpoints") == ["version-000001"]


def test_a_killed_writer_leaves_no_checkpoint(tmp_path):
    script = f"""
import os, signal
from pathlib import Path
from capo.learner.checkpoint import Checkpoints
def write(folder):
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
Checkpoints(Path({str(tmp_path)!r}), 3).save(2, write)
"""
    checkpoints = Checkpoints(tmp_path, 3)
    save_all(checkpoints, 1)
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (checkpoints.latest().version, checkpoints.versions()) == (1, [1])
    save_all(checkpoints, 2)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["version-000001", "version-000002"]


@pytest.fixture
def small_disk(tmp_path: Path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(folder)], capture_output=True
    )
    if mount.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def large(folder: Path) -> None:
    (folder / "weights").write_bytes(bytes(3 << 20))


def test_room_is_checked_before_anything_is_written(small_disk):
    checkpoints = Checkpoints(small_disk, 3)
    checkpoints.save(1, large)
    written = []
    with pytest.raises(StorageFullError, match=r"needs 4 MiB and .* has 2"):
        checkpoints.save(2, written.append)
    assert written == []
    assert checkpoints.latest().version == 1


def test_room_for_the_first_checkpoint_is_checked_by_an_estimate(small_disk):
    checkpoints = Checkpoints(small_disk, 3)
    written = []
    with pytest.raises(StorageFullError, match=r"needs 8 MiB and .* has [56]"):
        checkpoints.save(1, written.append, 7 << 20)
    assert written == []
    assert checkpoints.latest() is None
    checkpoints.save(1, large, 4 << 20)
    assert checkpoints.latest().version == 1
    (small_disk / "ballast").write_bytes(bytes(1 << 20))
    with pytest.raises(StorageFullError, match="needs 4 MiB"):  # the newest one is no estimate
        checkpoints.save(2, written.append, 100)


def test_a_disk_that_fills_up_while_writing_is_said(small_disk):
    (small_disk / "ballast").write_bytes(bytes(4 << 20))
    checkpoints = Checkpoints(small_disk, 3)
    with pytest.raises(StorageFullError, match="make room"):
        checkpoints.save(1, large)
    assert os.listdir(small_disk / "checkpoints") == []
    (small_disk / "ballast").unlink()
    checkpoints.save(1, large)
    assert checkpoints.latest().version == 1
