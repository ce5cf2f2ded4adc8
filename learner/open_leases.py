"""Every open lease, of training and of an evaluation: who plays it, and what becomes of it.

Knows no lock, no clock and no run file: the scheduler guards it, consequences go to the journal.
"""

import heapq
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from capo.learner.evaluation_round import EvaluationRound
from capo.learner.journal import Journal, Revocation
from capo.learner.lease_book import LOST, PLAYING, UNRECEIVED, Attempt, Slot
from capo.learner.lease_order import LeaseOrder, evaluation_leases
from capo.learner.lease_pool import LeasePool
from capo.learner.run_endings import EndedEpisode
from capo.learner.run_leases import GrantedLease
from capo.learner.scheduler_restore import PastEvaluations, RestoredState
from capo.learner.scheduler_rules import SchedulerRules
from capo.protocol.records import Lease, Purpose, Task


class OpenLeases:
    """`pool` holds the training leases, `round` those of the evaluation that is going on, `past`
    the evaluations of before a crash."""

    def __init__(self, rules: SchedulerRules, order: LeaseOrder, journal: Journal) -> None:
        self._rules = rules
        self._journal = journal
        self.pool = LeasePool(rules, order, journal)
        self.round: EvaluationRound | None = None
        self.past = PastEvaluations()

    def restore(self, state: RestoredState) -> None:
        """Go on with the leases of before a crash."""
        self.past = state.evaluations
        self.pool.restore(
            state.groups,
            state.ready,
            state.next_group,
            state.batches,
            state.flat,
            state.flat_before,
        )
        for episode_id in state.orphans:
            self._journal.exclude(episode_id, "superseded")

    def begin_round(self, number: int, tasks: Sequence[Task], modes: Sequence[str]) -> None:
        """Evaluation `number`, with what was played of it already."""
        by_mode = {
            mode: [
                self.past.slot(plan)
                for plan in evaluation_leases(tasks, mode, number, self._rules.seed)
            ]
            for mode in modes
        }
        self.round = EvaluationRound(number, by_mode, self._rules.max_attempts, self._journal)

    def end_round(self) -> None:
        assert self.round is not None
        self.past.forget(self.round.number)
        self.round = None

    # Handing out

    def take_out(self, free: Mapping[str, int], version: int) -> list[tuple[Slot, GrantedLease]]:
        """Leases for actors with so many free slots, evenly: the next one goes to the freest.

        Training leases pause during an evaluation.
        """
        room = [(-slots, actor_id) for actor_id, slots in free.items() if slots > 0]
        heapq.heapify(room)
        granted = list[tuple[Slot, GrantedLease]]()
        while room and (slot := self._next(version)) is not None:
            slots, actor_id = heapq.heappop(room)
            if slots < -1:
                heapq.heappush(room, (slots + 1, actor_id))
            lease = slot.next_lease(version)
            granted.append((slot, GrantedLease(lease, slot.plan.number, actor_id)))
        return granted

    def useful_weights(self, version: int) -> tuple[int, int]:
        """Lowest and highest version of weights with which a lease is worth playing now."""
        if self.round is not None:
            return version, version
        return self.pool.batches - self._rules.max_staleness, sys.maxsize

    def put_back(self, granted: Sequence[tuple[Slot, GrantedLease]]) -> None:
        """These leases were taken out, but cannot be handed out."""
        for slot, _ in granted:
            self._keeper(slot).enqueue(slot)

    def hand_out(
        self, granted: Sequence[tuple[Slot, GrantedLease]], now: float
    ) -> dict[str, list[Lease]]:
        """These leases are played from now on; returns them by actor."""
        leases = dict[str, list[Lease]]()
        for slot, grant in granted:
            self._journal.counts["granted"] += 1
            self._journal.counts["reissued"] += bool(slot.attempts)
            slot.attempts.append(Attempt(grant.lease.episode_id, grant.actor_id, PLAYING, now))
            leases.setdefault(grant.actor_id, []).append(grant.lease)
        return leases

    # What becomes of them

    def ended(self, ended: EndedEpisode) -> bool:
        """An episode ended. Returns whether somebody waited for it."""
        slot = self._find(ended.episode_id)
        if slot is None or slot.ended is not None:
            if ended.excluded in ("", "superseded"):
                self._journal.exclude(ended.episode_id, "superseded")
            return False
        slot.attempts[-1].status = ended.excluded or ended.status.value
        if ended.excluded:
            self._journal.counts["failed"] += 1
            self._keeper(slot).failed(slot)
        else:
            slot.ended = ended
            if slot.plan.purpose is Purpose.TRAIN:
                self.pool.finished(slot)
        return True

    def lost(self, actor_id: str) -> None:
        """What this actor plays waits for somebody else."""
        for slot in self._played_by(actor_id):
            if slot.playing is None:  # retired together with another one of its group
                continue
            self._journal.counts["lost"] += 1
            self._come_to_nothing(slot, LOST)

    def not_received(self, actor_id: str, episode_ids: Iterable[str]) -> None:
        """This actor knows nothing of these episodes that were granted to it."""
        for episode_id in sorted(episode_ids):
            slot = self._find(episode_id)
            if slot is None or slot.playing is None or slot.playing.actor_id != actor_id:
                continue
            self._come_to_nothing(slot, UNRECEIVED)

    def back(self, actor_id: str, held: set[str], now: float) -> set[str]:
        """Settle what an actor that came back `held`; returns the episodes it plays now."""
        for slot in self._played_by(actor_id):
            if slot.attempts[-1].episode_id not in held:
                self._come_to_nothing(slot, UNRECEIVED)
        for episode_id in sorted(held):
            owned = self._find(episode_id)
            if owned is None or owned.attempts[-1].actor_id != actor_id:
                self._journal.revocations.append(
                    Revocation(actor_id, episode_id, "it was given to another actor, or closed")
                )
            elif owned.attempts[-1].status in (LOST, UNRECEIVED):
                self._journal.mark(owned, PLAYING)
                owned.attempts[-1].since_s = now
        return {slot.attempts[-1].episode_id for slot in self._played_by(actor_id)}

    # What can be seen

    def in_play(self) -> Iterator[Attempt]:
        return (attempt for slot in self._slots() if (attempt := slot.playing) is not None)

    def oldest_in_play(self) -> list[Attempt]:
        """The longest attempt of every actor that plays, sorted by actor."""
        oldest = dict[str, Attempt]()
        for attempt in self.in_play():
            known = oldest.setdefault(attempt.actor_id, attempt)
            if attempt.since_s < known.since_s:
                oldest[attempt.actor_id] = attempt
        return [attempt for _, attempt in sorted(oldest.items())]

    def num_waiting(self) -> int:
        """Leases that wait for an actor."""
        return sum(
            slot.waiting and not slot.given_up(self._rules.max_attempts) for slot in self._slots()
        )

    def _next(self, version: int) -> Slot | None:
        return self.pool.next(version) if self.round is None else self.round.next()

    def _come_to_nothing(self, slot: Slot, status: str) -> None:
        self._journal.mark(slot, status)
        self._keeper(slot).failed(slot)

    def _keeper(self, slot: Slot) -> LeasePool | EvaluationRound:
        if slot.plan.purpose is Purpose.TRAIN:
            return self.pool
        assert self.round is not None
        return self.round

    def _slots(self) -> Iterator[Slot]:
        yield from self.pool.slots.values()
        if self.round is not None:
            yield from self.round.slots.values()

    def _find(self, episode_id: str) -> Slot | None:
        """The open lease whose newest attempt this episode is."""
        lease_id = episode_id.rpartition(".")[0]
        slot = self.pool.slots.get(lease_id)
        if slot is None and self.round is not None:
            slot = self.round.slots.get(lease_id)
        if slot is None or not slot.attempts or slot.attempts[-1].episode_id != episode_id:
            return None
        return None if slot.given_up(self._rules.max_attempts) else slot

    def _played_by(self, actor_id: str) -> list[Slot]:
        return [
            slot
            for slot in self._slots()
            if (attempt := slot.playing) is not None and attempt.actor_id == actor_id
        ]
