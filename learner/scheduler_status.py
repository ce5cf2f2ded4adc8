"""What the scheduler hands out and tells about itself: batches, counts, and who waits for whom."""

from msgspec import Struct


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
