"""The episodes that an actor has in play, each in a task of its own, and the leases that wait.

Knows neither the learner nor the engine: its owner says when, and how many may be played at once.
"""

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from capo.protocol.records import Lease

REMEMBERED_LEASES = 2**14


class Episodes:
    """`play` plays one lease; `ended` is called after each, however it ended.

    Leases are played first in, first out. An attempt is played once, however often a network
    repeats its grant.
    """

    def __init__(
        self, play: Callable[[Lease], Coroutine[Any, Any, None]], ended: Callable[[], None]
    ) -> None:
        self._play = play
        self._ended = ended
        self._waiting: deque[Lease] = deque()
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._granted: dict[str, None] = {}  # the latest episode ids, oldest first

    @property
    def num_playing(self) -> int:
        return len(self._playing)

    @property
    def ids(self) -> tuple[str, ...]:
        """Of the episodes in play, then of the leases that wait."""
        return (*self._playing, *(lease.episode_id for lease in self._waiting))

    def take(self, leases: Sequence[Lease]) -> None:
        """Let those that are new wait their turn."""
        for lease in leases:
            if lease.episode_id not in self._granted:
                self._granted[lease.episode_id] = None
                self._waiting.append(lease)
        while len(self._granted) > REMEMBERED_LEASES:
            del self._granted[next(iter(self._granted))]

    def start(self, tasks: asyncio.TaskGroup, at_most: int) -> None:
        """Play waiting leases, as tasks of the group, until `at_most` episodes are in play."""
        while self._waiting and len(self._playing) < at_most:
            lease = self._waiting.popleft()
            task = tasks.create_task(self._play(lease))
            self._playing[lease.episode_id] = task
            task.add_done_callback(functools.partial(self._on_done, lease.episode_id))

    def revoke(self, episode_ids: Collection[str]) -> None:
        """Neither start these nor go on playing them."""
        unwanted = set(episode_ids)
        self._waiting = deque(one for one in self._waiting if one.episode_id not in unwanted)
        for episode_id in unwanted & self._playing.keys():
            self._playing[episode_id].cancel()

    def start_no_more(self) -> None:
        """Forget the leases that wait."""
        self._waiting.clear()

    def abort(self) -> None:
        """Cancel all that are in play."""
        for task in self._playing.values():
            task.cancel()

    async def settle(self, timeout_s: float) -> None:
        """Return when all that are in play have ended, or after `timeout_s`."""
        if self._playing:
            await asyncio.wait(self._playing.values(), timeout=timeout_s)

    def _on_done(self, episode_id: str, task: asyncio.Task[None]) -> None:
        self._playing.pop(episode_id, None)
        self._ended()
