"""The metrics of every update, twice: RUN/metrics.jsonl for programs, RUN/tensorboard for people.

A line is one JSON object with `version` (of the policy that the update made) and `time`. What is
not finite is null. The run file has the same numbers: a resumed run first rewrites the lines up to
its checkpoint from it, whatever became of the file, and appends the later ones as it repeats them.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from capo.learner.appending import AppendedFile
from capo.learner.event_file import EventFile
from capo.learner.run_tables import UpdateRow

FILE_NAME = "metrics.jsonl"


class MetricsLog:
    """A context manager. `past` are the updates before; none in a new run."""

    def __init__(
        self,
        run_dir: Path,
        past: Sequence[UpdateRow] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        path, events = run_dir / FILE_NAME, run_dir / "tensorboard"
        _rewrite(path, past)
        self._lines = AppendedFile(path)
        self._clock = clock
        self._written = len(past)  # the version of the last line
        self._events = EventFile(events, clock(), len(past) + 1 if events.exists() else None)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, version: int, metrics: Mapping[str, float]) -> None:
        """The update that made policy `version`; readers see the line when this returns.

        Raises StorageFullError when there is no room; call it again then, nothing is written twice.
        """
        now = self._clock()
        if version > self._written:
            self._lines.append(_line(version, now, metrics))
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


def _line(version: int, written_at: float | None, metrics: Mapping[str, float]) -> bytes:
    return msgspec.json.encode({"version": version, "time": written_at, **metrics}) + b"\n"


def _rewrite(path: Path, past: Sequence[UpdateRow]) -> None:
    beside = path.with_suffix(".tmp")
    with beside.open("wb") as file:
        file.writelines(_line(row.version + 1, row.done_at, row.metrics) for row in past)
    os.replace(beside, path)
