"""The names of actors on their way into the run file.

Only people read them, so a full disk merely delays them.
"""

import threading

from capo.learner.run_file import RunFile
from capo.protocol.errors import StorageFullError


class ActorNames:
    """From any thread."""

    def __init__(self, run_file: RunFile) -> None:
        self._run_file = run_file
        self._lock = threading.Lock()
        self._waiting: dict[str, str] = {}

    def add(self, actor_id: str, name: str) -> None:
        with self._lock:
            self._waiting[actor_id] = name
        self.store()

    def store(self) -> None:
        """Try again with those that found no room."""
        with self._lock:
            waiting = dict(self._waiting)
        for actor_id, name in waiting.items():
            try:
                self._run_file.actor_seen(actor_id, name)
            except StorageFullError:
                return
            with self._lock:
                self._waiting.pop(actor_id, None)
