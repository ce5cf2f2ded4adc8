"""RUN/checkpoints/version-000123: whole or not there, with a digest of every file.

A checkpoint is written beside its place, synced and renamed; its manifest names every file with
size and sha256. One that does not agree with its manifest is never used: `latest` falls back to the
one before and says so. What is in the files is the writer's business (Trainer.save).
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from capo.learner.appending import FULL
from capo.protocol.errors import CheckpointError, StorageFullError

FORMAT = 1
MANIFEST = "manifest.json"
SPARE_BYTES = 1 << 20  # less room than this is a full disk


class FileEntry(Struct, frozen=True):
    size: int
    sha256: str


class Manifest(Struct, frozen=True):
    format: int
    version: int
    files: dict[str, FileEntry]  # by path inside the checkpoint


class Checkpoint(Struct, frozen=True, kw_only=True):
    """A whole checkpoint. `refused` are sentences about newer ones that are torn."""

    version: int
    folder: Path
    digest: str  # of the manifest, so of everything
    refused: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of one run; the newest `keep_last` stay, older ones go."""

    def __init__(self, run_dir: Path, keep_last: int) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}")
        self._root = run_dir / "checkpoints"
        self._keep_last = keep_last

    def save(
        self, version: int, write: Callable[[Path], None], estimated_bytes: int = 0
    ) -> Checkpoint:
        """Let `write(folder)` fill a new folder, then make it the checkpoint of `version`.

        There must be room for one like the newest before anything is written, or for
        `estimated_bytes` where it is the first.

        Raises StorageFullError if there is no room; what was there before stays as it is.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        self._require_room(estimated_bytes)
        folder = self._folder(version)
        beside = folder.with_suffix(".tmp")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        try:
            write(beside)
            digest = _seal(beside, version)
        except BaseException as error:
            full = _free_bytes(self._root) < SPARE_BYTES or (
                isinstance(error, OSError) and error.errno in FULL
            )
            shutil.rmtree(beside, ignore_errors=True)
            if full and isinstance(error, Exception):
                raise self._no_room(SPARE_BYTES) from error
            raise
        replaced = folder.with_suffix(".old")
        shutil.rmtree(replaced, ignore_errors=True)
        if folder.exists():
            folder.rename(replaced)
        beside.rename(folder)
        _sync(self._root)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in self.versions()[: -self._keep_last]:
            shutil.rmtree(self._folder(old))
        return Checkpoint(version=version, folder=folder, digest=digest)

    def versions(self) -> list[int]:
        """Versions whose files are all there, oldest first; their content is not read."""
        found = [
            int(path.name.removeprefix("version-"))
            for path in self._root.glob("version-*")
            if path.name.removeprefix("version-").isdecimal()
        ]
        return [version for version in sorted(found) if not self._fault(version, read=False)]

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint; None when there is none at all.

        Raises CheckpointError if there are checkpoints, but every one is torn.
        """
        return self._newest(lambda version: True)

    def nearest_before(self, version: int) -> Checkpoint | None:
        """The newest whole checkpoint of this version or an older one."""
        return self._newest(lambda other: other <= version)

    def open(self, version: int) -> Checkpoint:
        """The checkpoint of this version. Raises CheckpointError if it is torn or missing."""
        fault = self._fault(version, read=True)
        if fault:
            raise CheckpointError(fault)
        folder = self._folder(version)
        return Checkpoint(version=version, folder=folder, digest=_digest(folder / MANIFEST))

    def _newest(self, wanted: Callable[[int], bool]) -> Checkpoint | None:
        refused = list[str]()
        folders = sorted(self._root.glob("version-*[0-9]"), reverse=True)
        for folder in folders:
            version = int(folder.name.removeprefix("version-"))
            if not wanted(version):
                continue
            try:
                return msgspec.structs.replace(self.open(version), refused=tuple(refused))
            except CheckpointError as error:
                refused.append(str(error))
        if refused:
            raise CheckpointError(
                f"No checkpoint in {self._root} can be used: {refused[0]} Start a new run in "
                f"another run_dir, or restore a copy."
            )
        return None

    def _fault(self, version: int, *, read: bool) -> str:
        """Why this checkpoint cannot be used, "" if it can. `read` compares the content as well."""
        folder = self._folder(version)
        if not folder.is_dir():
            known = ", ".join(str(other) for other in self.versions()) or "none"
            return f"There is no checkpoint of version {version}; there are: {known}."
        try:
            manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        except (OSError, msgspec.DecodeError):
            return f"The checkpoint {folder} is torn: its manifest is missing or damaged."
        if manifest.format != FORMAT or manifest.version != version:
            return (
                f"The checkpoint {folder} is of version {manifest.version}, format "
                f"{manifest.format}; expected version {version}, format {FORMAT}."
            )
        for name, entry in manifest.files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != entry.size:
                return f"The checkpoint {folder} is torn: {name} is missing or cut short."
            if read and _digest(path) != entry.sha256:
                return f"The checkpoint {folder} is torn: {name} is not what was written."
        return ""

    def _folder(self, version: int) -> Path:
        return self._root / f"version-{version:06d}"

    def _require_room(self, estimated_bytes: int) -> None:
        needed = estimated_bytes + SPARE_BYTES
        if versions := self.versions():
            files = (path for path in self._folder(versions[-1]).rglob("*") if path.is_file())
            needed = sum(path.stat().st_size for path in files) + SPARE_BYTES
        if _free_bytes(self._root) < needed:
            raise self._no_room(needed)

    def _no_room(self, needed: int) -> StorageFullError:
        return StorageFullError(
            f"A checkpoint needs {needed >> 20} MiB and the disk that holds {self._root} has "
            f"{_free_bytes(self._root) >> 20}: make room, the checkpoint before is untouched."
        )


def _seal(folder: Path, version: int) -> str:
    """Write the manifest and sync everything to the disk; the manifest's digest."""
    files = {
        str(path.relative_to(folder)): FileEntry(path.stat().st_size, _digest(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = msgspec.json.format(msgspec.json.encode(Manifest(FORMAT, version, files)))
    (folder / MANIFEST).write_bytes(manifest)
    for path in [*folder.rglob("*"), folder]:
        _sync(path)
    return hashlib.sha256(manifest).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _free_bytes(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize
