"""Scalars for TensorBoard, written at once and without a thread.

One event file per process, as TensorBoard expects; a full disk leaves it readable.
"""

import io
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from capo.learner.appending import AppendedFile


class EventFile:
    """`purge_from`: events of earlier files at this step and later are void (a run goes on)."""

    def __init__(self, folder: Path, now: float, purge_from: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(folder / name)
        self._head = [Event(wall_time=now, file_version="brain.Event:2")]
        if purge_from is not None:
            started = SessionLog(status=SessionLog.START)
            self._head.append(Event(wall_time=now, step=purge_from, session_log=started))

    def write(self, step: int, scalars: Mapping[str, float], now: float) -> None:
        """All scalars of one step. Raises StorageFullError; nothing of them is written then."""
        values = [Summary.Value(tag=name, simple_value=number) for name, number in scalars.items()]
        event = Event(wall_time=now, step=step, summary=Summary(value=values))
        self._file.append(_records([*self._head, event]))
        self._head = []

    def close(self) -> None:
        self._file.close()


def _records(events: list[Event]) -> bytes:
    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events:
        writer.write(event.SerializeToString())
    return buffer.getvalue()
