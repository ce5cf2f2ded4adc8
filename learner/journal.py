"""What follows from a change in the scheduler: rows to write, actors to tell, things to count.

Collected while the state changes, written and sent afterwards.
"""

from collections import Counter
from dataclasses import dataclass, field

from msgspec import Struct

from capo.learner.lease_book import CLOSED, LOST, PLAYING, UNRECEIVED, Slot
from capo.learner.run_leases import Note


class Revocation(Struct, frozen=True):
    """This actor need not play this episode on."""

    actor_id: str
    episode_id: str
    reason: str


@dataclass
class Journal:
    """`stale_tokens` are the action tokens of each episode that was excluded as too old."""

    notes: list[Note] = field(default_factory=list)
    revocations: list[Revocation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    stale_tokens: list[int] = field(default_factory=list)

    def exclude(self, episode_id: str, reason: str) -> None:
        """An ended episode is no training data after all."""
        self.counts[reason] += 1
        self.notes.append(Note(episode_id=episode_id, excluded=reason))

    def mark(self, slot: Slot, status: str) -> None:
        """The newest attempt of this lease has a new status: lost, unreceived, playing."""
        slot.attempts[-1].status = status
        self.notes.append(Note(episode_id=slot.attempts[-1].episode_id, lease_status=status))

    def retire(self, slot: Slot, reason: str) -> None:
        """Nobody waits for this lease any more; what arrives of it is superseded."""
        attempt = slot.attempts[-1] if slot.attempts else None
        if attempt is None or attempt.status not in (PLAYING, LOST, UNRECEIVED):
            return
        if attempt.status == PLAYING:
            self.revocations.append(Revocation(attempt.actor_id, attempt.episode_id, reason))
        self.mark(slot, CLOSED)

    def take_revocations(self) -> list[Revocation]:
        taken = list(self.revocations)
        self.revocations.clear()
        return taken

    def take_stale_tokens(self) -> tuple[int, ...]:
        taken = tuple(self.stale_tokens)
        self.stale_tokens.clear()
        return taken
