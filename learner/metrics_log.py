"""Metrics of a run for tools: RUN/metrics.jsonl, one object per update, and TensorBoard's files.

`version` counts finished updates. A run that goes on from a checkpoint computes the updates after
it again, so their lines are cut off first: every version has one line.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

FILE_NAME = "metrics.jsonl"


class MetricsLog:
    """A context manager. `resume_at` is the version that the run goes on from; 0 for a new one."""

    def __init__(self, run_dir: Path, resume_at: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = run_dir / FILE_NAME
        kept = [line for line in _lines(path) if line["version"] <= resume_at]
        beside = path.with_suffix(".tmp")
        beside.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
        beside.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._board: Any = SummaryWriter(
            str(run_dir / "tensorboard"), purge_step=resume_at + 1, flush_secs=10
        )

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._board.close()

    def write(self, version: int, metrics: Mapping[str, float]) -> None:
        """The metrics of the update that made `version`; on disk for readers when this returns."""
        self._file.write(json.dumps({"version": version, **metrics}) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            self._board.add_scalar(name, value, version)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last one may have been cut off by a crash."""
    if not path.exists():
        return []
    found = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and "version" in line:
            found.append(line)
    return found
