"""The life of a lease through its attempts, and of a group of leases. Knows no clock and no lock.

A lease waits, is played, and is finished or waits again; its group is whole when every member is
finished, and is dropped when one member cannot be.
"""

from dataclasses import dataclass, field

from capo.learner.lease_order import LeasePlan
from capo.learner.run_endings import EndedEpisode
from capo.protocol.records import EpisodeStatus, Lease

PLAYING = "playing"
LOST = EpisodeStatus.LOST.value  # its actor is gone
UNRECEIVED = "unreceived"  # its actor never got it; no failure
CLOSED = "closed"  # nobody waits for it any more
EMPTY = "empty"  # it ended before its first action: playing it again changes nothing
ERRORS = ("env_error", "engine_error", "incomplete", EMPTY)  # something is broken
FAILURES = (*ERRORS, LOST)
FLAT_TOLERANCE = 1e-8  # relative to their size; as credit_groups, which sees tensors


@dataclass(eq=False)
class Attempt:
    """One time that a lease was handed out. `status` is `playing` or why it no longer is."""

    episode_id: str
    actor_id: str
    status: str
    since_s: float


@dataclass(eq=False)
class Slot:
    """One lease: its plan, its attempts so far, and the episode it yielded. `queued` is kept by the
    queue that it is in, so that it is never in there twice."""

    plan: LeasePlan
    attempts: list[Attempt] = field(default_factory=list)
    ended: EndedEpisode | None = None
    queued: bool = False

    @property
    def playing(self) -> Attempt | None:
        if self.attempts and self.attempts[-1].status == PLAYING:
            return self.attempts[-1]
        return None

    @property
    def waiting(self) -> bool:
        return self.ended is None and self.playing is None

    def given_up(self, max_attempts: int) -> bool:
        """Whether it failed too often to be played again, or nobody waits for it any more."""
        statuses = [attempt.status for attempt in self.attempts]
        failures = sum(status in FAILURES for status in statuses)
        hopeless = failures >= max_attempts or EMPTY in statuses or CLOSED in statuses
        return self.ended is None and hopeless

    def next_lease(self, policy_version: int) -> Lease:
        plan = self.plan
        return Lease(
            lease_id=plan.lease_id,
            attempt=len(self.attempts) + 1,
            task=plan.task,
            group_id=plan.group_id,
            member=plan.member,
            purpose=plan.purpose,
            seed=plan.seed,
            policy_version=policy_version,
        )


@dataclass(eq=False)
class Group:
    """The leases that are consumed together; one, for methods without groups. `admitted`: whole,
    and waiting for a batch."""

    group_id: str
    slots: list[Slot]
    admitted: bool = False

    @property
    def whole(self) -> bool:
        return all(slot.ended is not None for slot in self.slots)

    @property
    def flat(self) -> bool:
        """Whether the members of a whole group all have the same return."""
        returns = [slot.ended.episode_return for slot in self.slots if slot.ended is not None]
        scale = max(1.0, *map(abs, returns))
        return len(returns) > 1 and max(returns) - min(returns) <= FLAT_TOLERANCE * scale

    def given_up(self, max_attempts: int) -> bool:
        return any(slot.given_up(max_attempts) for slot in self.slots)

    def min_version(self) -> int:
        """The oldest policy version that sampled a token of a whole group."""
        versions = [slot.ended.min_version for slot in self.slots if slot.ended is not None]
        return min(version for version in versions if version is not None)
