"""One blocking call in a thread of its own, whose end is told by a condition."""

import threading
from collections.abc import Callable


class Background(threading.Thread):
    """The transport's part of a broadcast; `error` is a sentence once it is `done`."""

    def __init__(self, work: Callable[[], None], changed: threading.Condition) -> None:
        super().__init__(name="weight transfer", daemon=True)
        self._work = work
        self._changed = changed
        self.done = False
        self.error = ""

    def run(self) -> None:
        error = ""
        try:
            self._work()
        except Exception as caught:  # its end of the boundary: the waiting thread reads the text
            error = str(caught) or type(caught).__name__
        with self._changed:
            self.error = error
            self.done = True
            self._changed.notify_all()
