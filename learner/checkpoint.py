"""Checkpoints on disk: written beside and renamed, proved before they are used, pruned.

RUN/checkpoints/version-000123 holds what the trainer saved and `manifest.json`, the size and sha256
of every file. What is torn is refused by name and the one before it is used. Knows no tensors.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from capo.protocol.errors import CheckpointError, StorageFullError

MANIFEST = "manifest.json"
ROOM_FACTOR = 1.1  # of the last checkpoint's size must be free before the next is written
_NAME = re.compile(r"version-(\d{6,})")


class Checkpoint(Struct, frozen=True):
    """A complete checkpoint. `digest` is of its manifest, so of all its bytes."""

    version: int
    folder: Path
    digest: str


class FileEntry(Struct, frozen=True):
    name: str  # relative to the checkpoint's folder
    size: int
    sha256: str


class Checkpoints:
    """The checkpoints of one run. `note` gets a sentence for every one that is passed over."""

    def __init__(
        self, run_dir: Path, keep_last: int, note: Callable[[str], None] = lambda text: None
    ) -> None:
        self._root = run_dir / "checkpoints"
        self._keep_last = keep_last
        self._note = note

    def versions(self) -> list[int]:
        """Of the checkpoints that are there, proved or not, in ascending order."""
        if not self._root.is_dir():
            return []
        matches = [_NAME.fullmatch(entry.name) for entry in self._root.iterdir()]
        return sorted(int(match[1]) for match in matches if match)

    def save(self, version: int, write: Callable[[Path], None]) -> Checkpoint:
        """Have `write` fill a folder, prove it by a manifest, put it in place, prune old ones.

        Raises StorageFullError if there is no room; then nothing has changed.
        """
        folder = self._folder(version)
        beside = folder.with_suffix(".tmp")
        shutil.rmtree(beside, ignore_errors=True)
        self._check_room()
        try:
            beside.mkdir(parents=True)
            write(beside)
            manifest = msgspec.json.encode(_entries(beside))
            (beside / MANIFEST).write_bytes(manifest)
            for path in [*beside.rglob("*"), beside]:
                _sync(path)
        except BaseException as error:
            shutil.rmtree(beside, ignore_errors=True)
            if _is_full(error):
                raise StorageFullError(
                    f"the checkpoint of version {version} does not fit on the disk of "
                    f"{self._root}; make room there"
                ) from error
            raise
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
        _sync(self._root)
        for old in self.versions()[: -self._keep_last]:
            if old != version:
                shutil.rmtree(self._folder(old))
        return Checkpoint(version, folder, hashlib.sha256(manifest).hexdigest())

    def open(self, version: int) -> Checkpoint:
        """The checkpoint of exactly this version; CheckpointError if it is missing or torn."""
        folder = self._folder(version)
        if not folder.is_dir():
            there = ", ".join(map(str, self.versions())) or "none"
            raise CheckpointError(
                f"there is no checkpoint of version {version}; there are: {there}"
            )
        return _prove(version, folder)

    def latest(self) -> Checkpoint | None:
        """The newest complete one; None when there is none at all.

        Raises CheckpointError when there are some and every one is torn.
        """
        versions = self.versions()
        return self.nearest(versions[-1]) if versions else None

    def nearest(self, version: int) -> Checkpoint:
        """The newest complete one of `version` or before; CheckpointError if there is none."""
        faults = []
        for candidate in reversed([found for found in self.versions() if found <= version]):
            try:
                return self.open(candidate)
            except CheckpointError as error:
                faults.append(str(error))
                self._note(f"{error}; the one before it is used.")
        raise CheckpointError(
            faults[0]
            if faults
            else f"{self._root} has no checkpoint of version {version} or before"
        )

    def _folder(self, version: int) -> Path:
        return self._root / f"version-{version:06d}"

    def _check_room(self) -> None:
        versions = self.versions()
        if not versions:
            return
        last = self._folder(versions[-1])
        needed = int(ROOM_FACTOR * sum(f.stat().st_size for f in last.rglob("*") if f.is_file()))
        free = shutil.disk_usage(self._root).free
        if free < needed:
            raise StorageFullError(
                f"a checkpoint needs {needed / 2**20:.0f} MiB, but {self._root} has "
                f"{free / 2**20:.0f} MiB left; make room there"
            )


def _is_full(error: BaseException) -> bool:
    """Safetensors reports the system's error in a type and text of its own."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "No space left on device" in str(error)


def _entries(folder: Path) -> list[FileEntry]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return [
        FileEntry(str(path.relative_to(folder)), path.stat().st_size, _sha256(path))
        for path in files
    ]


def _prove(version: int, folder: Path) -> Checkpoint:
    try:
        manifest = (folder / MANIFEST).read_bytes()
        entries = msgspec.json.decode(manifest, type=list[FileEntry])
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"the checkpoint {folder} is torn: no readable manifest") from error
    for entry in entries:
        path = folder / entry.name
        if not path.is_file():
            raise CheckpointError(f"the checkpoint {folder} is torn: {entry.name} is missing")
        if path.stat().st_size != entry.size or _sha256(path) != entry.sha256:
            raise CheckpointError(
                f"the checkpoint {folder} is torn: {entry.name} is not as it was written"
            )
    return Checkpoint(version, folder, hashlib.sha256(manifest).hexdigest())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
