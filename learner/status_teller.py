"""Tells a learner's status: to RUN/status.json every second, over the wire to anyone who asks."""

import math
from collections.abc import Callable
from pathlib import Path

import msgspec

from capo.learner.status_file import LearnerStatus, write_status

WRITE_EVERY_S = 1.0
ANSWER_EVERY_S = 0.5  # it costs a look at every actor and lease


class StatusTeller:
    """For one thread. `status` makes one."""

    def __init__(
        self, run_dir: Path, status: Callable[[], LearnerStatus], clock: Callable[[], float]
    ) -> None:
        self._run_dir = run_dir
        self._status = status
        self._clock = clock
        self._write_at = clock()
        self._answered_at = -math.inf
        self._answer = b""

    def write_if_due(self) -> bool:
        """Whether a second had passed, and the file was written."""
        now = self._clock()
        if now < self._write_at:
            return False
        self._write_at = now + WRITE_EVERY_S
        write_status(self._run_dir, self._status())
        return True

    def answer(self) -> bytes:
        """JSON of a LearnerStatus that is not old."""
        now = self._clock()
        if now >= self._answered_at + ANSWER_EVERY_S:
            self._answered_at, self._answer = now, msgspec.json.encode(self._status())
        return self._answer
