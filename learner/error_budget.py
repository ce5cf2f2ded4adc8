"""How many of the latest episodes may fail before a run that teaches nothing is stopped."""

from collections import deque

from capo.learner.lease_book import ERRORS
from capo.learner.run_endings import EndedEpisode


class ErrorBudget:
    """Exhausted once more than `fraction * window` of the last `window` episodes are errors.

    That an actor went away is no error: nodes may come and go.
    """

    def __init__(self, fraction: float, window: int) -> None:
        self._allowed = fraction * window
        self._window = window
        self._latest: deque[bool] = deque(maxlen=window)
        self.last_error = ""

    def count(self, ended: EndedEpisode) -> None:
        is_error = ended.excluded in ERRORS
        self._latest.append(is_error)
        if is_error:
            self.last_error = ended.error or f"episode {ended.episode_id} ended as {ended.excluded}"

    def verdict(self) -> str:
        """Why the run must stop, "" while it need not."""
        errors = sum(self._latest)
        if errors <= self._allowed:
            return ""
        return (
            f"{errors} of the last {len(self._latest)} episodes failed, and "
            f"scheduler.max_error_fraction allows {self._allowed:g} of {self._window}; the last "
            f"error was: {self.last_error}"
        )
