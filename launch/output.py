"""Standard output and error of a command, and what happens when they cannot be written.

A reader that has left its pipe, a terminal that was closed and a full disk all end in an OSError at
the next word, or as the interpreter exits. A run must not die of that; a result must not be cut
short without a word.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO, Literal, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Unfailing(io.FileIO):
    """Takes everything; what the file behind it does not take is lost."""

    def write(self, data: "ReadableBuffer", /) -> int:
        rest = memoryview(data).cast("B")
        size = rest.nbytes
        with contextlib.suppress(OSError):
            while rest and (taken := super().write(rest)):  # None: it takes nothing just now
                rest = rest[taken:]
        return size


@contextlib.contextmanager
def unfailing(name: Literal["stdout", "stderr"]) -> Iterator[None]:
    """Inside, writing to this stream never fails, whoever writes."""
    before = getattr(sys, name)
    try:
        raw = _Unfailing(before.fileno(), "w", closefd=False)
    except (AttributeError, OSError):  # there is none, or it is no file
        yield
        return
    # No BufferedWriter between them: it refuses a signal handler's word in the midst of another.
    stream = io.TextIOWrapper(
        cast(BinaryIO, raw),
        encoding=before.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )
    setattr(sys, name, stream)
    try:
        yield
    finally:
        setattr(sys, name, before)
        stream.flush()


def finish_output() -> None:
    """Hand over what was printed. Raises OSError where it is not taken."""
    if sys.stdout is not None:  # None: it was closed from the start
        sys.stdout.flush()


def abandon_output() -> None:
    """What standard output has not taken, it will not take at the exit either: forget it."""
    try:
        finish_output()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
