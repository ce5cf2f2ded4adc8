"""The open training leases: which one goes out next, which groups are whole, which are dropped.

Knows no lock, no clock and no run file; consequences go to the journal.
"""

import heapq
from collections.abc import Sequence

from capo.learner.journal import Journal
from capo.learner.lease_book import Group, Slot
from capo.learner.lease_order import LeaseOrder
from capo.learner.run_endings import EndedEpisode
from capo.learner.scheduler_rules import SchedulerRules
from capo.learner.staleness import in_time, is_stale, may_start


class LeasePool:
    """`slots` are the leases of open groups by id, `ready` the whole groups, first one first.

    `batches` were assembled so far, by this process or before: the next one has that number.
    `flat` groups were replaced since the last one, `flat_before` in all batches before it.
    """

    def __init__(self, rules: SchedulerRules, order: LeaseOrder, journal: Journal) -> None:
        self._rules = rules
        self._order = order
        self._journal = journal
        self._queue = list[tuple[int, str]]()  # a heap; entries that do not wait are skipped
        self._groups = dict[str, Group]()
        self.slots = dict[str, Slot]()
        self.ready = list[Group]()
        self.batches = 0
        self.flat = 0
        self.flat_before = 0
        self.next_group = 0

    def restore(
        self,
        groups: Sequence[Group],
        ready: Sequence[Group],
        next_group: int,
        batches: int,
        flat: int,
        flat_before: int,
    ) -> None:
        self.next_group, self.batches = next_group, batches
        self.flat, self.flat_before = flat, flat_before
        for group in groups:
            self._open(group)
        for group in ready:
            self._decide(group)

    def next(self, version: int) -> Slot | None:
        """Take out the next lease to hand out: one that waits, or the first of a new group."""
        if not in_time(version, self.batches, self._rules.max_staleness):
            return None
        while True:
            while self._queue:
                slot = self.slots.get(heapq.heappop(self._queue)[1])
                if slot is not None:
                    slot.queued = False
                    if slot.waiting:
                        return slot
            if not may_start(
                version=version,
                batches_assembled=self.batches,
                episodes_alive=len(self.slots),
                group_size=self._rules.group_size,
                batch_episodes=self._rules.batch_episodes,
                max_staleness=self._rules.max_staleness,
                updates=self._rules.updates,
            ):
                return None
            plans = self._order.group(self.next_group)
            self.next_group += 1
            self._open(Group(plans[0].group_id, [Slot(plan) for plan in plans]))

    def enqueue(self, slot: Slot) -> None:
        if not slot.queued:
            slot.queued = True
            heapq.heappush(self._queue, (slot.plan.number, slot.plan.lease_id))

    def failed(self, slot: Slot) -> None:
        """The newest attempt came to nothing: try again, or drop the group."""
        if not slot.given_up(self._rules.max_attempts):
            self.enqueue(slot)
            return
        self._journal.counts["given_up"] += 1
        self._drop(self._groups[slot.plan.group_id], "a member of its group was given up")
        if self._in_order:
            self._decide_in_order()

    def finished(self, slot: Slot) -> None:
        """The newest attempt yielded an episode."""
        group = self._groups[slot.plan.group_id]
        if group.whole:
            self._decide(group)

    def has_batch(self) -> bool:
        return len(self.ready) * self._rules.group_size >= self._rules.batch_episodes

    def peek_batch(self) -> tuple[str, ...]:
        """The episodes of the next batch: the groups whole first, sorted by lease number."""
        slots = [slot for group in self._next_groups() for slot in group.slots]
        slots.sort(key=lambda slot: slot.plan.number)
        return tuple(slot.attempts[-1].episode_id for slot in slots)

    def remove_batch(self) -> None:
        """The batch that `peek_batch` showed is consumed."""
        for group in self._next_groups():
            self._close(group)
        self.batches += 1
        self.flat_before += self.flat
        self.flat = 0
        self._drop_stale()

    @property
    def num_buffered(self) -> int:
        return sum(slot.ended is not None for slot in self.slots.values())

    def _next_groups(self) -> list[Group]:
        return self.ready[: self._rules.batch_episodes // self._rules.group_size]

    @property
    def _in_order(self) -> bool:
        """Whether groups are decided upon in the order of their leases: where a synchronous run
        replaces flat ones, those that use up the limit must not depend on who was faster."""
        return self._rules.max_staleness == 0 and self._rules.max_flat_batches > 0

    def _decide(self, group: Group) -> None:
        """What becomes of a group that is whole now."""
        if self._in_order:
            self._decide_in_order()
        else:
            self._admit(group)

    def _decide_in_order(self) -> None:
        for group in list(self._groups.values()):  # they were opened in this order
            if not group.whole:
                return
            if not group.admitted:
                self._admit(group)

    def _admit(self, group: Group) -> None:
        """A whole group waits for a batch, unless it is too old or, up to the limit, flat."""
        if self._is_stale(group):
            self._drop(group, "")
        elif group.flat and self.flat < self._max_flat:
            self.flat += 1
            for slot in group.slots:
                assert slot.ended is not None
                self._journal.exclude(slot.ended.episode_id, "flat")
            self._close(group)
        else:
            group.admitted = True
            self.ready.append(group)

    @property
    def _max_flat(self) -> int:
        rules = self._rules
        return rules.max_flat_batches * rules.batch_episodes // rules.group_size

    def _open(self, group: Group) -> None:
        self._groups[group.group_id] = group
        for slot in group.slots:
            self.slots[slot.plan.lease_id] = slot
            if slot.waiting:
                self.enqueue(slot)

    def _close(self, group: Group) -> None:
        del self._groups[group.group_id]
        if group.admitted:
            self.ready.remove(group)
        for slot in group.slots:
            del self.slots[slot.plan.lease_id]

    def _drop(self, group: Group, reason: str) -> None:
        for slot in group.slots:
            if slot.ended is None:
                self._journal.retire(slot, reason)
            elif self._too_old(slot.ended):
                self._journal.exclude(slot.ended.episode_id, "stale")
                self._journal.stale_tokens.append(slot.ended.num_action_tokens)
            else:
                self._journal.exclude(slot.ended.episode_id, "group")
        self._close(group)

    def _drop_stale(self) -> None:
        """What was young enough for the batch before may be too old for this one."""
        for group in [group for group in self.ready if self._is_stale(group)]:
            self._drop(group, "")

    def _is_stale(self, group: Group) -> bool:
        return any(slot.ended is not None and self._too_old(slot.ended) for slot in group.slots)

    def _too_old(self, ended: EndedEpisode) -> bool:
        return ended.min_version is not None and is_stale(
            ended.min_version, self.batches, self._rules.max_staleness
        )
