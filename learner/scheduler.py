"""Who plays what, and which episodes make a batch: one state machine behind one condition.

Thread-safe; knows no sockets and no tensors, and leaves what becomes of a lease to `open_leases`.
What a restarted learner must know is in the run file before it has an effect, so `restore`
continues where a crash interrupted.

Synchronous mode (max_staleness 0) alternates: the leases of a batch go out when its policy version
is there, and the batch is trained when they are all in. A batch is ordered by lease number, so its
order does not depend on who was faster. Otherwise the groups that were whole first make the batch.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from capo.learner import scheduler_restore
from capo.learner.error_budget import ErrorBudget
from capo.learner.evaluation_round import ModeResult
from capo.learner.journal import Journal, Revocation
from capo.learner.lease_order import LeaseOrder, tasks_digest
from capo.learner.open_leases import OpenLeases
from capo.learner.run_endings import EndedEpisode
from capo.learner.run_file import RunFile
from capo.learner.scheduler_rules import SchedulerRules
from capo.learner.scheduler_status import Batch, SchedulerStatus, snapshot
from capo.protocol.errors import CapoError, StorageFullError
from capo.protocol.records import Lease, Task


class Scheduler:
    """Made by `create` for a new run, by `restore` for one that goes on, by `open` for either."""

    def __init__(
        self,
        rules: SchedulerRules,
        order: LeaseOrder,
        run_file: RunFile,
        clock: Callable[[], float],
        version: int = 0,
        before: scheduler_restore.RestoredState | None = None,
    ) -> None:
        """`before`: what a run whose policy is at `version` had come to when it was interrupted."""
        self._run_file = run_file
        self._clock = clock
        self._changed = threading.Condition()
        self._journal = Journal()
        self._leases = OpenLeases(rules, order, self._journal)
        self._retake = dict[int, tuple[str, ...]]()  # batches that were taken before a crash
        if before is not None:
            self._leases.restore(before)
            self._retake = before.retake
        self._version = version
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
        clock: Callable[[], float] = time.monotonic,
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
        clock: Callable[[], float] = time.monotonic,
    ) -> "Scheduler":
        """The scheduler of an interrupted run whose policy is at `version`, by the run file alone.

        Leases in play stay with their actors (`holders`) until `actor_lost` says otherwise. Batches
        of `version` and later that were taken already are taken again, with the same episodes in
        the same order. Raises RunFileError if the tasks are not the run's.
        """
        order = LeaseOrder(tasks, rules.seed, rules.group_size)
        before = scheduler_restore.load(run_file.path, rules, tasks, order, version, clock())
        return cls(rules, order, run_file, clock, version, before)

    @classmethod
    def open(
        cls,
        rules: SchedulerRules,
        tasks: Sequence[Task],
        run_file: RunFile,
        version: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> "Scheduler":
        """`create` if nothing was ever scheduled in this run, else `restore`.

        A run that crashed before its first checkpoint goes on at version 0.
        """
        if scheduler_restore.has_begun(run_file.path):
            return cls.restore(rules, tasks, run_file, version, clock)
        return cls.create(rules, tasks, run_file, clock)

    # For the server's side

    def deal(self, free: Mapping[str, int]) -> dict[str, list[Lease]]:
        """Leases for actors with so many free slots, evenly: the next one goes to the freest. They
        are in the run file when this returns.

        Raises StorageFullError if they cannot be written down; then nothing was handed out.
        """
        with self._changed:
            granted = self._leases.take_out(free, self._version)
            if not granted:
                return {}
            try:
                self._run_file.record_leases([grant for _, grant in granted], self._journal.notes)
            except BaseException:
                self._leases.put_back(granted)
                raise
            self._journal.notes.clear()
            return self._leases.hand_out(granted, self._clock())

    def useful_weights(self) -> tuple[int, int]:
        """Lowest and highest version of weights with which a lease is worth playing now: young
        enough for the next batch, or those that are evaluated."""
        with self._changed:
            return self._leases.useful_weights(self._version)

    def episode_ended(self, ended: EndedEpisode) -> None:
        """What a commit found to be new; to be called in the order of commits."""
        with self._changed:
            if self._leases.ended(ended):
                self._errors.count(ended)
                self._failure = self._failure or self._errors.verdict()
            self._flush()
            self._changed.notify_all()

    def actor_lost(self, actor_id: str) -> None:
        """What this actor plays will be played by somebody else, unless it is back before."""
        with self._changed:
            self._leases.lost(actor_id)
            self._flush()
            self._changed.notify_all()

    def not_received(self, actor_id: str, episode_ids: Iterable[str]) -> None:
        """These were granted to this actor, which knows nothing of them: others will play them."""
        with self._changed:
            self._leases.not_received(actor_id, episode_ids)
            self._flush()

    def actor_back(self, actor_id: str, held: Iterable[str]) -> set[str]:
        """An actor says which episodes it plays, or has played without being acked.

        They stay its own where nobody else got them meanwhile; the others are revoked. Leases that
        it should have but does not know are given to somebody else. Returns those it really plays:
        without the ones whose end is committed, though it has not heard so.
        """
        with self._changed:
            playing = self._leases.back(actor_id, set(held), self._clock())
            self._flush()
            return playing

    def take_revocations(self) -> list[Revocation]:
        """Episodes that need not be played on; each is told once."""
        with self._changed:
            return self._journal.take_revocations()

    def holders(self) -> set[str]:
        """The actors that play something; after `restore` those that are expected back."""
        with self._changed:
            return {attempt.actor_id for attempt in self._leases.in_play()}

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
            episode_ids = self._retake[self._version] if again else self._leases.pool.peek_batch()
            pool = self._leases.pool
            flat_groups = 0 if again else pool.flat
            facts = (
                {scheduler_restore.FLAT_BEFORE: str(pool.flat_before + flat_groups)}
                if flat_groups
                else {}
            )
            self._run_file.begin_update(self._version, episode_ids, self._journal.notes, facts)
            self._journal.notes.clear()
            if again:
                del self._retake[self._version]
            else:
                pool.remove_batch()
            self._taken = self._version
            del self._waits["batch"]
            return Batch(
                version=self._version,
                episode_ids=episode_ids,
                again=again,
                waited_s=self._clock() - started,
                stale_tokens=self._journal.take_stale_tokens(),
                flat_groups=flat_groups,
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
            if self._leases.round is not None:
                raise ValueError("an evaluation is going on already")
            task_ids = [task.id for task in tasks]
            number = self._leases.past.find(self._version, modes, task_ids)
            if number is None:
                number = self._run_file.begin_evaluation(self._version, modes, task_ids)
            self._leases.begin_round(number, tasks, modes)

    def wait_evaluation(self, timeout_s: float) -> dict[str, ModeResult] | None:
        """The results by mode once every lease has ended or was given up; None if not in time."""
        with self._changed:
            going_on = self._leases.round
            if going_on is None:
                raise ValueError("no evaluation was started")
            self._waits.setdefault("evaluation", self._clock())
            if not self._wait(lambda: going_on.over, timeout_s):
                return None
            results = going_on.results()
            self._run_file.finish_evaluation(going_on.number, msgspec.json.encode(results))
            self._leases.end_round()
            del self._waits["evaluation"]
            return results

    def status(self) -> SchedulerStatus:
        """A snapshot for `capo status` and the progress line."""
        with self._changed:
            return snapshot(
                self._version,
                self._leases,
                self._journal.counts,
                self._errors.last_error,
                self._waits,
                self._clock(),
            )

    # Inside; the condition is held

    def _batch_there(self) -> bool:
        return self._version in self._retake or self._leases.pool.has_batch()

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        there = self._changed.wait_for(lambda: bool(self._failure) or condition(), timeout_s)
        if self._failure:
            raise CapoError(self._failure)
        return there

    def _flush(self) -> None:
        """Write notes down now if there is room, else together with the next leases or batch."""
        if self._journal.notes:
            with contextlib.suppress(StorageFullError):
                self._run_file.record_leases([], self._journal.notes)
                self._journal.notes.clear()
