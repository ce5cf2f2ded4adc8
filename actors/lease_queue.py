"""The leases an actor was granted and does not play yet, each of them once."""

from collections import deque
from collections.abc import Collection, Sequence

from capo.protocol.records import Lease

REMEMBERED_LEASES = 2**14


class LeaseQueue:
    """First in, first out. An attempt is taken once, however often a network repeats its grant."""

    def __init__(self) -> None:
        self._pending: deque[Lease] = deque()
        self._granted: dict[str, None] = {}  # the latest episode ids, oldest first

    def take(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            if lease.episode_id not in self._granted:
                self._granted[lease.episode_id] = None
                self._pending.append(lease)
        while len(self._granted) > REMEMBERED_LEASES:
            del self._granted[next(iter(self._granted))]

    def __len__(self) -> int:
        return len(self._pending)

    def next(self) -> Lease:
        return self._pending.popleft()

    def drop(self, episode_ids: Collection[str]) -> None:
        self._pending = deque(one for one in self._pending if one.episode_id not in episode_ids)

    def clear(self) -> None:
        self._pending.clear()

    def episode_ids(self) -> list[str]:
        return [lease.episode_id for lease in self._pending]
