"""Who plays what, and which episodes make a batch: one state machine behind one condition.

Thread-safe; knows no sockets and no tensors. What a restarted learner must know is in the run file
before it has an effect, so `restore` continues where a crash interrupted.

Synchronous mode (max_staleness 0) alternates: the leases of a batch go out when its policy version
is there, and the batch is trained when they are all in. A batch is ordered by lease number, so its
order does not depend on who was faster. Otherwise the groups that were whole first make the batch.
"""

import heapq
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from capo.learner import scheduler_restore
from capo.learner.error_budget import ErrorBudget
from capo.learner.evaluation_round import EvaluationRound, ModeResult
from capo.learner.journal import Journal, Revocation
from capo.learner.lease_book import LOST, PLAYING, UNRECEIVED, Attempt, Slot
from capo.learner.lease_order import LeaseOrder, evaluation_leases, tasks_digest
from capo.learner.lease_pool import LeasePool
from capo.learner.run_file import GrantedLease, RunFile
from capo.learner.run_ingest import EndedEpisode
from capo.learner.scheduler_rules import SchedulerRules
from capo.learner.scheduler_status import Batch, SchedulerStatus, Wait
from capo.protocol.errors import CapoError, RunFileError, StorageFullError
from capo.protocol.records import Lease, Purpose, Task

Clock = Callable[[], float]


class Scheduler:
    """Made by `create` for a new run, by `restore` for one that goes on, by `open` for either."""

    def __init__(
        self, rules: SchedulerRules, order: LeaseOrder, run_file: RunFile, clock: Clock
    ) -> None:
        self._rules = rules
        self._run_file = run_file
        self._clock = clock
        self._changed = threading.Condition()
        self._journal = Journal()
        self._pool = LeasePool(rules, order, self._journal)
        self._round: EvaluationRound | None = None
        self._past = scheduler_restore.PastEvaluations()
        self._retake = dict[int, tuple[str, ...]]()  # batches that were taken before a crash
        self._version = 0
        self._taken: int | None = None
        self._errors = ErrorBudget(rules.max_error_fraction, rules.error_window)
        self._failure = ""
        self._waits = dict[str, float]()  # what the main thread waits for, since when

    @classmethod
    def create(
        cls,
        rules: SchedulerRules,
        tasks: Sequence[Task],
        run_file: RunFile,
        clock: Clock = time.monotonic,
    ) -> "Scheduler":
        """The scheduler of a new run over its training tasks."""
        order = LeaseOrder(tasks, rules.seed, rules.group_size)
        run_file.set_facts({"train_tasks": tasks_digest(tasks)})
        return cls(rules, order, run_file, clock)

    @classmethod
    def restore(
        cls,
        rules: SchedulerRules,
        tasks: Sequence[Task],
        run_file: RunFile,
        version: int,
        clock: Clock = time.monotonic,
    ) -> "Scheduler":
        """The scheduler of an interrupted run whose policy is at `version`, by the run file alone.

        Leases in play stay with their actors (`holders`) until `actor_lost` says otherwise. Batches
        of `version` and later that were taken already are taken again, with the same episodes in
        the same order. Raises RunFileError if the tasks are not the run's.
        """
        order = LeaseOrder(tasks, rules.seed, rules.group_size)
        state = scheduler_restore.load(
            run_file.path, order, rules.group_size, rules.max_attempts, version, clock()
        )
        if state.tasks_digest != tasks_digest(tasks):
            raise RunFileError(
                f"The training tasks are not those that {run_file.path} was started with: restore "
                f"the environment's data and options, or start a new run."
            )
        scheduler = cls(rules, order, run_file, clock)
        scheduler._version = version
        scheduler._retake = state.retake
        scheduler._past = state.evaluations
        scheduler._pool.restore(state.groups, state.ready, state.next_group, state.batches)
        for episode_id in state.orphans:
            scheduler._journal.exclude(episode_id, "superseded")
        return scheduler

    @classmethod
    def open(
        cls,
        rules: SchedulerRules,
        tasks: Sequence[Task],
        run_file: RunFile,
        version: int,
        clock: Clock = time.monotonic,
    ) -> "Scheduler":
        """`create` if nothing was ever scheduled in this run, else `restore`.

        A run that crashed before its first checkpoint goes on at version 0.
        """
        if scheduler_restore.has_begun(run_file.path):
            return cls.restore(rules, tasks, run_file, version, clock)
        return cls.create(rules, tasks, run_file, clock)

    # For the server's side

    def grant(self, actor_id: str, slots: int) -> list[Lease]:
        """Up to `slots` leases for this actor; they are in the run file when this returns."""
        return self.deal({actor_id: slots}).get(actor_id, [])

    def deal(self, free: Mapping[str, int]) -> dict[str, list[Lease]]:
        """Leases for several actors at once, evenly: the next one goes to the freest.

        Raises StorageFullError if they cannot be written down; then nothing was handed out.
        """
        with self._changed:
            room = [(-slots, actor_id) for actor_id, slots in free.items() if slots > 0]
            heapq.heapify(room)
            granted = list[tuple[Slot, GrantedLease]]()
            while room and (slot := self._next()) is not None:
                slots, actor_id = heapq.heappop(room)
                if slots < -1:
                    heapq.heappush(room, (slots + 1, actor_id))
                lease = slot.next_lease(self._version)
                granted.append((slot, GrantedLease(lease, slot.plan.number, actor_id)))
            if not granted:
                return {}
            try:
                self._run_file.record_leases([grant for _, grant in granted], self._journal.notes)
            except BaseException:
                for slot, _ in granted:
                    self._book(slot).enqueue(slot)
                raise
            self._journal.notes.clear()
            leases = dict[str, list[Lease]]()
            now = self._clock()
            for slot, grant in granted:
                self._journal.counts["granted"] += 1
                self._journal.counts["reissued"] += bool(slot.attempts)
                slot.attempts.append(Attempt(grant.lease.episode_id, grant.actor_id, PLAYING, now))
                leases.setdefault(grant.actor_id, []).append(grant.lease)
            return leases

    def useful_weights(self) -> tuple[int, int]:
        """Lowest and highest version of weights with which a lease is worth playing now: young
        enough for the next batch, or those that are evaluated."""
        with self._changed:
            if self._round is not None:
                return self._version, self._version
            return self._pool.batches - self._rules.max_staleness, sys.maxsize

    def episode_ended(self, ended: EndedEpisode) -> None:
        """What a commit found to be new; to be called in the order of commits."""
        with self._changed:
            slot = self._slot_of(ended.episode_id)
            if slot is None or slot.ended is not None:
                if ended.excluded in ("", "superseded"):
                    self._journal.exclude(ended.episode_id, "superseded")
            else:
                slot.attempts[-1].status = ended.excluded or ended.status.value
                self._errors.count(ended)
                self._failure = self._failure or self._errors.verdict()
                if ended.excluded:
                    self._journal.counts["failed"] += 1
                    self._book(slot).failed(slot)
                else:
                    slot.ended = ended
                    if slot.plan.purpose is Purpose.TRAIN:
                        self._pool.finished(slot)
            self._flush()
            self._changed.notify_all()

    def actor_lost(self, actor_id: str) -> None:
        """What this actor plays will be played by somebody else, unless it is back before."""
        with self._changed:
            for slot in self._played_by(actor_id):
                if slot.playing is None:  # retired together with another one of its group
                    continue
                self._journal.counts["lost"] += 1
                self._journal.mark(slot, LOST)
                self._book(slot).failed(slot)
            self._flush()
            self._changed.notify_all()

    def not_received(self, actor_id: str, episode_ids: Iterable[str]) -> None:
        """These were granted to this actor, which knows nothing of them: others will play them."""
        with self._changed:
            for episode_id in sorted(episode_ids):
                slot = self._slot_of(episode_id)
                if slot is None or slot.playing is None or slot.playing.actor_id != actor_id:
                    continue
                self._journal.mark(slot, UNRECEIVED)
                self._book(slot).failed(slot)
            self._flush()

    def actor_back(self, actor_id: str, held: Iterable[str]) -> set[str]:
        """An actor says which episodes it plays, or has played without being acked.

        They stay its own where nobody else got them meanwhile; the others are revoked. Leases that
        it should have but does not know are given to somebody else. Returns those it really plays:
        without the ones whose end is committed, though it has not heard so.
        """
        with self._changed:
            held = set(held)
            for slot in self._played_by(actor_id):
                if slot.attempts[-1].episode_id not in held:
                    self._journal.mark(slot, UNRECEIVED)
                    self._book(slot).failed(slot)
            for episode_id in sorted(held):
                owned = self._slot_of(episode_id)
                if owned is None or owned.attempts[-1].actor_id != actor_id:
                    self._journal.revocations.append(
                        Revocation(actor_id, episode_id, "it was given to another actor, or closed")
                    )
                elif owned.attempts[-1].status in (LOST, UNRECEIVED):
                    self._journal.mark(owned, PLAYING)
                    owned.attempts[-1].since_s = self._clock()
            self._flush()
            return {slot.attempts[-1].episode_id for slot in self._played_by(actor_id)}

    def take_revocations(self) -> list[Revocation]:
        """Episodes that need not be played on; each is told once."""
        with self._changed:
            taken = list(self._journal.revocations)
            self._journal.revocations.clear()
            return taken

    def holders(self) -> set[str]:
        """The actors that play something; after `restore` those that are expected back."""
        with self._changed:
            return {attempt.actor_id for attempt in self._in_play()}

    def stop(self, reason: str) -> None:
        """Make the main thread's waits raise CapoError with this reason."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    # For the main thread

    def take_batch(self, timeout_s: float) -> Batch | None:
        """The batch of the current policy version, or None when there is none in time.

        It is in the run file as taken. Raises CapoError when too many episodes failed, and
        StorageFullError when there is no room to write it down (call again later).
        """
        with self._changed:
            if self._taken is not None:
                raise ValueError(f"the batch of version {self._taken} was taken already")
            started = self._waits.setdefault("batch", self._clock())
            if not self._wait(self._batch_there, timeout_s):
                return None
            again = self._version in self._retake
            episode_ids = self._retake[self._version] if again else self._pool.peek_batch()
            self._run_file.begin_update(self._version, episode_ids, self._journal.notes)
            self._journal.notes.clear()
            if again:
                del self._retake[self._version]
            else:
                self._pool.remove_batch()
            self._taken = self._version
            del self._waits["batch"]
            stale_tokens = tuple(self._journal.stale_tokens)
            self._journal.stale_tokens.clear()
            return Batch(
                version=self._version,
                episode_ids=episode_ids,
                again=again,
                waited_s=self._clock() - started,
                stale_tokens=stale_tokens,
            )

    def version_advanced(self, version: int) -> None:
        """The update is done and the engines have the weights of `version`: its leases may go."""
        with self._changed:
            if self._taken is None or version != self._taken + 1:
                raise ValueError(f"version {version} does not follow from batch {self._taken}")
            self._version = version
            self._taken = None

    def start_evaluation(self, tasks: Sequence[Task], modes: Sequence[str]) -> None:
        """Play every task once per mode ("sampled", "greedy") before any training lease goes out.

        An evaluation of this version that a crash interrupted is continued; one that was finished
        before the crash is not played again.
        """
        with self._changed:
            if self._round is not None:
                raise ValueError("an evaluation is going on already")
            task_ids = [task.id for task in tasks]
            number = self._past.find(self._version, modes, task_ids)
            if number is None:
                number = self._run_file.begin_evaluation(self._version, modes, task_ids)
            self._round = EvaluationRound(
                number,
                {
                    mode: [
                        self._past.slot(plan)
                        for plan in evaluation_leases(tasks, mode, number, self._rules.seed)
                    ]
                    for mode in modes
                },
                self._rules.max_attempts,
                self._journal,
            )

    def wait_evaluation(self, timeout_s: float) -> dict[str, ModeResult] | None:
        """The results by mode once every lease has ended or was given up; None if not in time."""
        with self._changed:
            if self._round is None:
                raise ValueError("no evaluation was started")
            self._waits.setdefault("evaluation", self._clock())
            if not self._wait(lambda: self._round is not None and self._round.over, timeout_s):
                return None
            results = self._round.results()
            self._run_file.finish_evaluation(self._round.number, msgspec.json.encode(results))
            self._past.forget(self._round.number)
            self._round = None
            del self._waits["evaluation"]
            return results

    def status(self) -> SchedulerStatus:
        """A snapshot for `capo status` and the progress line."""
        with self._changed:
            playing = dict[str, int]()
            for attempt in self._in_play():
                playing[attempt.actor_id] = playing.get(attempt.actor_id, 0) + 1
            return SchedulerStatus(
                version=self._version,
                batches=self._pool.batches,
                playing=playing,
                waiting=sum(
                    slot.waiting and not slot.given_up(self._rules.max_attempts)
                    for slot in self._slots()
                ),
                buffered=self._pool.num_buffered,
                evaluation_done=self._round.num_done if self._round else 0,
                evaluation_total=len(self._round.slots) if self._round else 0,
                counts=dict(self._journal.counts),
                last_error=self._errors.last_error,
                waits=tuple(self._who_waits()),
            )

    # Inside; the condition is held

    def _next(self) -> Slot | None:
        """Training leases pause during an evaluation."""
        return self._pool.next(self._version) if self._round is None else self._round.next()

    def _book(self, slot: Slot) -> LeasePool | EvaluationRound:
        if slot.plan.purpose is Purpose.TRAIN:
            return self._pool
        assert self._round is not None
        return self._round

    def _slots(self) -> Iterator[Slot]:
        yield from self._pool.slots.values()
        if self._round is not None:
            yield from self._round.slots.values()

    def _slot_of(self, episode_id: str) -> Slot | None:
        """The open lease whose newest attempt this episode is."""
        lease_id = episode_id.rpartition(".")[0]
        slot = self._pool.slots.get(lease_id)
        if slot is None and self._round is not None:
            slot = self._round.slots.get(lease_id)
        if slot is None or not slot.attempts or slot.attempts[-1].episode_id != episode_id:
            return None
        return None if slot.given_up(self._rules.max_attempts) else slot

    def _played_by(self, actor_id: str) -> list[Slot]:
        return [
            slot
            for slot in self._slots()
            if (attempt := slot.playing) is not None and attempt.actor_id == actor_id
        ]

    def _in_play(self) -> Iterator[Attempt]:
        return (attempt for slot in self._slots() if (attempt := slot.playing) is not None)

    def _batch_there(self) -> bool:
        return self._version in self._retake or self._pool.has_batch()

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        there = self._changed.wait_for(lambda: bool(self._failure) or condition(), timeout_s)
        if self._failure:
            raise CapoError(self._failure)
        return there

    def _flush(self) -> None:
        """Write notes down now if there is room, else together with the next leases or batch."""
        if not self._journal.notes:
            return
        try:
            self._run_file.record_leases([], self._journal.notes)
        except StorageFullError:
            return
        self._journal.notes.clear()

    def _who_waits(self) -> Iterator[Wait]:
        now = self._clock()
        for what, since in self._waits.items():
            yield Wait(who="the learner", whom=what, since_s=now - since)
        oldest = dict[str, Attempt]()
        for attempt in self._in_play():
            known = oldest.setdefault(attempt.actor_id, attempt)
            if attempt.since_s < known.since_s:
                oldest[attempt.actor_id] = attempt
        for actor_id, attempt in sorted(oldest.items()):
            whom = f"actor {actor_id} to end episode {attempt.episode_id}"
            yield Wait(who="the scheduler", whom=whom, since_s=now - attempt.since_s)
