"""What the scheduler decides about leases, as rows of the run file: who plays what, and its fate.

Its functions write inside a transaction that the caller holds.
"""

from collections.abc import Sequence
from sqlite3 import Connection

from msgspec import Struct

from capo.protocol.records import Lease


class GrantedLease(Struct, frozen=True):
    """A lease and the actor it goes to. `number` is its place in the order of its purpose."""

    lease: Lease
    number: int
    actor_id: str


class Note(Struct, frozen=True, kw_only=True):
    """What became of an episode outside of its own records; None leaves a column as it is."""

    episode_id: str
    lease_status: str | None = None  # playing, lost, unreceived, closed
    excluded: str | None = None


def store_leases(connection: Connection, granted: Sequence[GrantedLease], now: float) -> None:
    """Add leases that are played from now on, and their tasks."""
    connection.executemany(
        "INSERT OR IGNORE INTO tasks VALUES (?, ?)",
        [(grant.lease.task.id, grant.lease.task.payload) for grant in granted],
    )
    connection.executemany(
        "INSERT INTO leases VALUES (?,?,?,?,?,?,?,?,?,?,?,'playing',?,NULL)",
        [_lease_row(grant, now) for grant in granted],
    )


def apply_notes(connection: Connection, notes: Sequence[Note], now: float) -> None:
    """Update the leases and episodes that the notes are about, in their order."""
    for note in notes:
        if note.lease_status is not None:
            ended_at = None if note.lease_status == "playing" else now
            connection.execute(
                "UPDATE leases SET status = ?, ended_at = ? WHERE episode_id = ?",
                (note.lease_status, ended_at, note.episode_id),
            )
        if note.excluded is not None:
            connection.execute(
                "UPDATE episodes SET excluded = ? WHERE episode_id = ?",
                (note.excluded, note.episode_id),
            )


def _lease_row(grant: GrantedLease, now: float) -> tuple[str | int | float, ...]:
    lease = grant.lease
    return (
        lease.episode_id,
        lease.lease_id,
        lease.attempt,
        grant.number,
        lease.task.id,
        lease.group_id,
        lease.member,
        lease.purpose.value,
        lease.seed,
        lease.policy_version,
        grant.actor_id,
        now,
    )
