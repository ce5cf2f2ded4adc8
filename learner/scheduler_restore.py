"""The scheduler's state, derived from a run file alone: what was granted, ended and consumed.

Derived by the rules that the scheduler applies while it runs, so nothing here depends on a last
word that a crash may have prevented.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from capo.learner.lease_book import Attempt, Group, Slot
from capo.learner.lease_order import LeaseOrder, LeasePlan, tasks_digest
from capo.learner.run_endings import EndedEpisode
from capo.learner.run_reader import RunReader
from capo.learner.run_tables import EpisodeRow, EvaluationRow, LeaseRow, UpdateRow
from capo.learner.scheduler_rules import SchedulerRules
from capo.protocol.errors import RunFileError
from capo.protocol.records import Purpose, Task

FLAT_BEFORE = "flat_groups_before"  # a fact: replaced up to the newest batch
DROPPED = ("stale", "group", "flat")  # whole groups that no update takes


@dataclass
class PastEvaluations:
    """Evaluations of before a crash: their rows, and attempts and endings by lease id."""

    rows: list[EvaluationRow] = field(default_factory=list)
    attempts: dict[str, list[Attempt]] = field(default_factory=dict)
    ended: dict[str, EndedEpisode] = field(default_factory=dict)

    def find(self, version: int, modes: Sequence[str], task_ids: Sequence[str]) -> int | None:
        """The number of the evaluation of this version, in these modes, on these tasks."""
        for row in self.rows:
            if (row.version, row.modes, row.task_ids) == (version, tuple(modes), tuple(task_ids)):
                return row.number
        return None

    def forget(self, number: int) -> None:
        """This evaluation was continued and is over; the next one is a new one."""
        self.rows = [row for row in self.rows if row.number != number]

    def slot(self, plan: LeasePlan) -> Slot:
        """An evaluation's lease with what became of it so far."""
        return Slot(plan, self.attempts.get(plan.lease_id, []), ended=self.ended.get(plan.lease_id))


@dataclass
class RestoredState:
    """`ready` are the whole groups among `groups`, first finished first. `flat` groups were
    replaced since the last batch, `flat_before` up to it. `orphans` are episodes of no open group,
    where a crash came before that was written down."""

    batches: int
    flat: int
    flat_before: int
    next_group: int
    groups: list[Group]
    ready: list[Group]
    retake: dict[int, tuple[str, ...]]
    evaluations: PastEvaluations
    orphans: list[str]


def has_begun(path: Path) -> bool:
    """Whether this run file ever had a scheduler."""
    with RunReader(path) as reader:
        return "train_tasks" in reader.facts()


def load(
    path: Path,
    rules: SchedulerRules,
    tasks: Sequence[Task],
    order: LeaseOrder,
    version: int,
    now: float,
) -> RestoredState:
    """Read the state of a run whose policy is at `version`; `order` is that of `tasks`.

    Raises RunFileError if the tasks are not the run's, or an update is missing.
    """
    with RunReader(path) as reader:
        facts = reader.facts()
        leases = reader.leases()
        episodes = {row.episode_id: row for row in reader.episodes()}
        updates = reader.updates()
        evaluation_rows = reader.evaluations()
    retake = _retake(path, updates, version)
    if facts.get("train_tasks", "") != tasks_digest(tasks):
        raise RunFileError(
            f"The training tasks are not those that {path} was started with: restore the "
            f"environment's data and options, or start a new run."
        )
    attempts = _attempts(leases, now)
    ended = _newest_endings(leases, episodes)
    next_group = _next_group(leases, rules.group_size)
    consumed = {row.lease_id for row in episodes.values() if row.consumed_by is not None}
    groups = [
        group
        for index in range(next_group)
        if (group := _group(order, index, attempts, ended, consumed, rules.max_attempts))
        is not None
    ]
    num_flat = sum(row.excluded == "flat" for row in episodes.values()) // rules.group_size
    flat_before = int(facts.get(FLAT_BEFORE, "0"))
    return RestoredState(
        batches=max((row.version + 1 for row in updates), default=0),
        flat=num_flat - flat_before,
        flat_before=flat_before,
        next_group=next_group,
        groups=groups,
        ready=_by_arrival([group for group in groups if group.whole], episodes),
        retake=retake,
        evaluations=PastEvaluations(
            evaluation_rows,
            {lease_id: tries for lease_id, tries in attempts.items() if lease_id[0] == "e"},
            {lease_id: end for lease_id, end in ended.items() if not end.excluded},
        ),
        orphans=_orphans(episodes.values(), groups),
    )


def _retake(path: Path, updates: Sequence[UpdateRow], version: int) -> dict[int, tuple[str, ...]]:
    """The batches of `version` and later, which were taken already."""
    retake = {row.version: row.episode_ids for row in updates if row.version >= version}
    if sorted(retake) != list(range(version, version + len(retake))):
        raise RunFileError(
            f"{path} records no update {version} but later ones: resume from an earlier checkpoint."
        )
    return retake


def _attempts(leases: Sequence[LeaseRow], now: float) -> dict[str, list[Attempt]]:
    """By lease id, first one first."""
    attempts = defaultdict[str, list[Attempt]](list)
    for row in sorted(leases, key=lambda row: row.attempt):
        attempts[row.lease_id].append(Attempt(row.episode_id, row.actor_id, row.status, now))
    return attempts


def _newest_endings(
    leases: Sequence[LeaseRow], episodes: Mapping[str, EpisodeRow]
) -> dict[str, EndedEpisode]:
    """How the newest attempt of a lease ended, by lease id; an older one does not count."""
    newest = {row.lease_id: row.episode_id for row in sorted(leases, key=lambda row: row.attempt)}
    return {
        lease_id: _ended(episodes[episode_id])
        for lease_id, episode_id in newest.items()
        if episode_id in episodes
    }


def _next_group(leases: Sequence[LeaseRow], group_size: int) -> int:
    numbers = [row.number for row in leases if row.purpose == Purpose.TRAIN]
    return max(numbers) // group_size + 1 if numbers else 0


def _by_arrival(whole: Sequence[Group], episodes: Mapping[str, EpisodeRow]) -> list[Group]:
    """Whole groups, the one whose last episode came first at the front."""

    def finished_at(group: Group) -> int:
        return max(
            episodes[slot.ended.episode_id].arrival
            for slot in group.slots
            if slot.ended is not None
        )

    return sorted(whole, key=finished_at)


def _orphans(episodes: Iterable[EpisodeRow], groups: Sequence[Group]) -> list[str]:
    wanted = {
        slot.ended.episode_id for group in groups for slot in group.slots if slot.ended is not None
    }
    return [
        row.episode_id
        for row in episodes
        if row.purpose == Purpose.TRAIN
        and row.consumed_by is None
        and not row.excluded
        and row.episode_id not in wanted
    ]


def _group(
    order: LeaseOrder,
    index: int,
    attempts: Mapping[str, list[Attempt]],
    ended: Mapping[str, EndedEpisode],
    consumed: set[str],
    max_attempts: int,
) -> Group | None:
    """The group if it is still open: neither consumed, nor dropped, nor to be given up."""
    plans = order.group(index)
    slots = [Slot(plan, attempts.get(plan.lease_id, [])) for plan in plans]
    group = Group(plans[0].group_id, slots)
    for slot in slots:
        lease_id = slot.plan.lease_id
        end = ended.get(lease_id)
        if lease_id in consumed or (end is not None and end.excluded in DROPPED):
            return None
        if end is not None and not end.excluded:
            slot.ended = end
    return None if group.given_up(max_attempts) else group


def _ended(row: EpisodeRow) -> EndedEpisode:
    return EndedEpisode(
        episode_id=row.episode_id,
        lease_id=row.lease_id,
        attempt=row.attempt,
        actor_id=row.actor_id,
        purpose=row.purpose,
        status=row.status,
        outcome=row.outcome,
        episode_return=row.episode_return,
        num_steps=row.num_steps,
        num_action_tokens=row.num_action_tokens,
        min_version=row.min_version,
        max_version=row.max_version,
        excluded=row.excluded,
        error=row.error,
    )
