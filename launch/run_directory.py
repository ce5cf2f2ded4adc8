"""Where a run lies: its directory, the learner's address in it, its recorded configuration."""

import os
import shutil
import time
from pathlib import Path

import msgspec

from capo.configs.schema import RunConfig
from capo.protocol.errors import ConfigError

DATABASE = "run.sqlite"
MODEL = "model"
_LEARNER = "learner.json"
_STATUS = "status.json"


class LearnerAddress(msgspec.Struct, frozen=True):
    """Written by a learner that listens, for `capo status` and for people."""

    address: str
    pid: int


def choose_run_directory(config: RunConfig) -> Path:
    """The configured directory, or a new one under runs/ that names run, seed and time."""
    if config.run_dir:
        return Path(config.run_dir)
    return Path("runs") / f"{config.name}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def write_address(run_dir: Path, address: str) -> None:
    target = run_dir / _LEARNER
    beside = target.with_suffix(".tmp")
    beside.write_bytes(msgspec.json.encode(LearnerAddress(address, os.getpid())))
    beside.replace(target)


def read_address(run_dir: Path) -> str | None:
    """Where the learner of a run listens, or listened last; None if nothing there says so."""
    try:
        return msgspec.json.decode((run_dir / _LEARNER).read_bytes(), type=LearnerAddress).address
    except (OSError, msgspec.DecodeError):  # not begun yet, or on a disk that is away for a moment
        return None


def config_of(run_dir: Path) -> RunConfig:
    """The configuration a run goes by. Raises RunFileError if no run is there, or none to read."""
    from capo.learner.run_reader import RunReader

    with RunReader(run_dir) as reader:
        return reader.config()


def require_unused(run_dir: Path) -> None:
    """Raises ConfigError where a new run would take somebody's folder for its starting policy."""
    if (run_dir / MODEL).exists() and not (run_dir / DATABASE).exists():
        raise ConfigError(
            f"{run_dir} has a {MODEL} but no {DATABASE}: choose another run_dir, or move "
            f"{run_dir / MODEL} away."
        )


def discard_run(run_dir: Path) -> None:
    """Take back the files of a start that failed before anything was played."""
    for name in (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", "run.lock", _LEARNER, _STATUS):
        (run_dir / name).unlink(missing_ok=True)
    for name in (MODEL, f"{MODEL}.tmp", "description"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    if run_dir.is_dir() and not any(run_dir.iterdir()):
        run_dir.rmdir()
