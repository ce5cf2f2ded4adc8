"""What a person sees while a run goes on: one row per update, a status line, tables at the end.

Knows nothing of tensors, sockets or the run file; it gets plain numbers.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from capo.protocol.sayings import plain

_COLUMNS = (
    ("update", 9),
    ("success", 8),
    ("return", 7),
    ("out of range", 13),
    ("mu", 10),
    ("tokens/s", 9),
    ("stale", 6),
    ("wait", 7),
    ("train", 7),
    ("sync", 7),
    ("actors busy", 12),
)
_HEADER_EVERY = 20


class Progress:
    """Prints to one console. On a terminal the status line says what waits for what."""

    def __init__(self, console: Console, total_updates: int) -> None:
        self._console = console
        self._total = total_updates
        self._rows = 0
        self._status: Status | None = None

    def note(self, text: str) -> None:
        self._print(plain(text), markup=False)

    def waiting(self, text: str) -> None:
        """Replace the status line; without a terminal nothing is shown."""
        if not self._console.is_terminal:
            return
        if self._status is None:
            self._status = self._console.status(Text(plain(text)))
            self._status.start()
        else:
            self._status.update(Text(plain(text)))

    def update(self, version: int, metrics: Mapping[str, float]) -> None:
        """One row. `metrics` are the update's, by the names of docs/metrics.md."""
        if self._rows % _HEADER_EVERY == 0:
            names = "".join(f"{name:>{width}}" for name, width in _COLUMNS)
            self._print(names, style="bold")
        self._rows += 1
        cells = (
            f"{version}/{self._total}",
            _number(metrics, "batch/outcome", "{:.2f}"),
            _number(metrics, "batch/return", "{:.2f}"),
            _number(metrics, "ratio/out_of_range", "{:.2f}"),
            _number(metrics, "policy/mu", "{:.1e}"),
            _number(metrics, "system/tokens_per_s", "{:,.0f}"),
            _number(metrics, "staleness/mean", "{:.1f}"),
            _seconds(metrics, "time/wait_s"),
            _seconds(metrics, "time/update_s"),
            _seconds(metrics, "time/sync_s"),
            _number(metrics, "actors/busy_fraction", "{:.0%}"),
        )
        # A cell that is too wide moves the rest of its row, but never touches its neighbour.
        widths = [
            max(width, len(cell) + 1) for cell, (_, width) in zip(cells, _COLUMNS, strict=True)
        ]
        self.note("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(title=title, title_justify="left")
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        self._print(table, soft_wrap=False)

    def _print(self, what: str | Table, **how: Any) -> None:
        """Output that goes nowhere (a full disk, a closed terminal) must not end a run."""
        with contextlib.suppress(OSError):
            self._console.print(what, **{"highlight": False, "soft_wrap": True, **how})

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _number(metrics: Mapping[str, float], name: str, form: str) -> str:
    return form.format(metrics[name]) if name in metrics else "-"


def _seconds(metrics: Mapping[str, float], name: str) -> str:
    """Three digits of a time."""
    if name not in metrics:
        return "-"
    seconds = metrics[name]
    if seconds >= 999.5:
        return f"{seconds / 60:,.0f} min"
    digits = 2 if seconds < 9.995 else 1 if seconds < 99.95 else 0
    return f"{seconds:.{digits}f} s"
