"""The metrics of every update, twice: RUN/metrics.jsonl for programs, RUN/tensorboard for people.

A line is one JSON object with `version` (of the policy that the update made) and `time`. What is
not finite is null. A resumed run takes back the lines after its checkpoint: it will write them
again.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import msgspec

from capo.learner.appending import AppendedFile
from capo.learner.event_file import EventFile

FILE_NAME = "metrics.jsonl"


class MetricsLog:
    """A context manager. `resume_at` is the version that the run goes on from; 0 = a new run."""

    def __init__(
        self, run_dir: Path, resume_at: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        path = run_dir / FILE_NAME
        _keep_until(path, resume_at)
        self._lines = AppendedFile(path)
        self._clock = clock
        self._written = resume_at  # the version of the last line
        self._events = EventFile(
            run_dir / "tensorboard", clock(), resume_at + 1 if resume_at else None
        )

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, version: int, metrics: Mapping[str, float]) -> None:
        """The update that made policy `version`; readers see the line when this returns.

        Raises StorageFullError when there is no room; call it again then, nothing is doubled.
        """
        now = self._clock()
        if version > self._written:
            line = {"version": version, "time": now, **metrics}
            self._lines.append(msgspec.json.encode(line) + b"\n")
            self._written = version
        self._events.write(version, metrics, now)

    def close(self) -> None:
        self._lines.close()
        self._events.close()


def read_metrics(run_dir: Path) -> list[dict[str, float | None]]:
    """All lines, oldest first; a line that is being written right now is left out."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=dict[str, float | None]) for line in lines]


def _keep_until(path: Path, version: int) -> None:
    """Take back the lines after `version`, and one that a crash cut off."""
    if not path.exists():
        return
    kept = [
        line
        for line in path.read_bytes().split(b"\n")[:-1]
        if msgspec.json.decode(line)["version"] <= version
    ]
    beside = path.with_suffix(".tmp")
    beside.write_bytes(b"".join(line + b"\n" for line in kept))
    os.replace(beside, path)
