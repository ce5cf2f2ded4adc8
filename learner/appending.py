"""Appending to a file so that a full disk leaves it as it was: whole records or none."""

import errno
import os
from pathlib import Path

from capo.protocol.errors import StorageFullError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class AppendedFile:
    """Goes on at the end of `path`, which is made if it is missing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._end = os.lseek(self._descriptor, 0, os.SEEK_END)

    def append(self, record: bytes) -> None:
        """All of `record`, or nothing and StorageFullError when there is no room for it."""
        try:
            done = 0
            while done < len(record):
                done += os.pwrite(self._descriptor, record[done:], self._end + done)
        except OSError as error:
            os.ftruncate(self._descriptor, self._end)
            if error.errno not in FULL:
                raise
            raise StorageFullError(
                f"The disk that holds {self._path} is full: make room, the run goes on by itself."
            ) from error
        self._end += len(record)

    def close(self) -> None:
        os.close(self._descriptor)
