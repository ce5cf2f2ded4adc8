"""What the scheduler hands out and tells about itself: batches, counts, and who waits for whom."""

from collections import Counter
from collections.abc import Iterator, Mapping

from msgspec import Struct

from capo.learner.open_leases import OpenLeases


class Batch(Struct, frozen=True, kw_only=True):
    """Episodes of the update that starts from policy `version`, in training order.

    `again`: this update was taken before a crash. `stale_tokens`: the action tokens of every
    episode that was excluded as too old since the batch before, so that the starving of long tasks
    is seen. `flat_groups` were replaced since then, because their members all did alike. `waited_s`
    is how long the learner stood still for it.
    """

    version: int
    episode_ids: tuple[str, ...]
    again: bool
    waited_s: float
    stale_tokens: tuple[int, ...]
    flat_groups: int


class Wait(Struct, frozen=True, kw_only=True):
    """`who` has been waiting for `whom`."""

    who: str
    whom: str
    since_s: float


class SchedulerStatus(Struct, frozen=True, kw_only=True):
    """A snapshot. `playing` is by actor; `buffered` episodes have ended and wait to be trained on;
    `waiting` leases wait for an actor. `counts` since this scheduler began: granted, reissued,
    lost, failed, superseded, stale, group (excluded with its group), flat, given_up (leases)."""

    version: int
    batches: int
    playing: dict[str, int]
    waiting: int
    buffered: int
    evaluation_done: int
    evaluation_total: int
    counts: dict[str, int]
    last_error: str
    waits: tuple[Wait, ...]


def snapshot(
    version: int,
    leases: OpenLeases,
    counts: Mapping[str, int],
    last_error: str,
    waits: Mapping[str, float],
    now: float,
) -> SchedulerStatus:
    """`waits`: what the main thread waits for, since when."""
    going_on = leases.round
    return SchedulerStatus(
        version=version,
        batches=leases.pool.batches,
        playing=dict(Counter(attempt.actor_id for attempt in leases.in_play())),
        waiting=leases.num_waiting(),
        buffered=leases.pool.num_buffered,
        evaluation_done=going_on.num_done if going_on else 0,
        evaluation_total=len(going_on.slots) if going_on else 0,
        counts=dict(counts),
        last_error=last_error,
        waits=tuple(_who_waits(leases, waits, now)),
    )


def _who_waits(leases: OpenLeases, waits: Mapping[str, float], now: float) -> Iterator[Wait]:
    for what, since in waits.items():
        yield Wait(who="the learner", whom=what, since_s=now - since)
    for attempt in leases.oldest_in_play():
        whom = f"actor {attempt.actor_id} to end episode {attempt.episode_id}"
        yield Wait(who="the scheduler", whom=whom, since_s=now - attempt.since_s)
