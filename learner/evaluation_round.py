"""One evaluation: every task once per mode, outside of training. Knows no lock and no clock."""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from capo.learner.journal import Journal
from capo.learner.lease_book import Slot
from capo.learner.run_endings import EndedEpisode


class ModeResult(Struct, frozen=True, kw_only=True):
    """What an evaluation found in one mode. `success` is the mean outcome of the `episodes` that
    were played to an end; `given_up` more tasks could not be, and are not among them."""

    episodes: int
    given_up: int
    success: float
    success_stderr: float
    mean_return: float
    mean_steps: float


class EvaluationRound:
    """`slots` are its leases by id. Slots that have ended already are not played again."""

    def __init__(
        self,
        number: int,
        by_mode: Mapping[str, Sequence[Slot]],
        max_attempts: int,
        journal: Journal,
    ) -> None:
        self.number = number
        self._by_mode = by_mode
        self._max_attempts = max_attempts
        self._journal = journal
        self._queue = deque[str]()
        self._given_up = set[str]()
        self.slots = {slot.plan.lease_id: slot for slots in by_mode.values() for slot in slots}
        for slot in self.slots.values():
            if slot.waiting:
                self.failed(slot)

    def next(self) -> Slot | None:
        while self._queue:
            slot = self.slots[self._queue.popleft()]
            slot.queued = False
            if slot.waiting and slot.plan.lease_id not in self._given_up:
                return slot
        return None

    def enqueue(self, slot: Slot) -> None:
        if not slot.queued:
            slot.queued = True
            self._queue.append(slot.plan.lease_id)

    def failed(self, slot: Slot) -> None:
        """The newest attempt, if there was one, came to nothing."""
        if not slot.given_up(self._max_attempts):
            self.enqueue(slot)
            return
        self._journal.counts["given_up"] += 1
        self._given_up.add(slot.plan.lease_id)
        self._journal.retire(slot, "it failed too often")

    @property
    def num_done(self) -> int:
        ended = sum(slot.ended is not None for slot in self.slots.values())
        return len(self._given_up) + ended

    @property
    def over(self) -> bool:
        return self.num_done == len(self.slots)

    def results(self) -> dict[str, ModeResult]:
        return {
            mode: summarise([slot.ended for slot in slots if slot.ended is not None], len(slots))
            for mode, slots in self._by_mode.items()
        }


def summarise(ended: Sequence[EndedEpisode], num_tasks: int) -> ModeResult:
    """Means over the ended episodes, 0 where there are none; the standard error has ddof 1."""
    outcomes = np.array([episode.outcome for episode in ended] or [0.0])
    spread = float(outcomes.std(ddof=1)) if len(outcomes) > 1 else 0.0
    return ModeResult(
        episodes=len(ended),
        given_up=num_tasks - len(ended),
        success=float(outcomes.mean()),
        success_stderr=spread / len(outcomes) ** 0.5,
        mean_return=float(np.mean([episode.episode_return for episode in ended] or [0.0])),
        mean_steps=float(np.mean([episode.num_steps for episode in ended] or [0])),
    )
