"""What a commit does inside its transaction: store what an owner delivered, close what ended.

An episode belongs to the actor that its lease went to. Records of anybody else, and steps that
cannot be training data, are refused and counted; an episode that lost a step that way ends as
incomplete. What is stored already stays as it is.
"""

from collections.abc import Mapping, Sequence, Set
from sqlite3 import Connection

from msgspec import Struct

from capo.learner.run_endings import EndedEpisode, EpisodeLimits, end_episode
from capo.learner.run_rows import StepRow, step_fault, step_row
from capo.protocol.messages import Delivery
from capo.protocol.records import EpisodeEnd


class Committed(Struct, frozen=True):
    """What a commit changed. `fault` describes the last refused record."""

    ended: tuple[EndedEpisode, ...] = ()
    num_steps: int = 0
    num_refused: int = 0
    fault: str = ""


def store(
    connection: Connection,
    owners: Mapping[str, str],
    fresh: Sequence[tuple[str, Delivery]],
    limits: EpisodeLimits,
    now: float,
) -> Committed:
    """Store deliveries of (actor_id, delivery). `owners`: episode id -> actor, of those in play."""
    rows = list[StepRow]()
    ends = list[tuple[str, EpisodeEnd]]()
    ended_here = set[str]()
    faults = dict[str, str]()
    last_sequences = dict[str, int]()
    num_refused = 0
    for actor_id, delivery in fresh:
        last_sequences[actor_id] = delivery.sequence
        for step in delivery.steps:
            fault = (
                _foreign(connection, owners, actor_id, step.episode_id)
                or _too_late(connection, owners, ended_here, step.episode_id)
                or step_fault(step, limits.vocabulary_size)
            )
            if fault:
                num_refused += 1
                faults[step.episode_id] = fault
            else:
                rows.append(step_row(step))
        for end in delivery.ends:
            fault = _foreign(connection, owners, actor_id, end.episode_id)
            if fault:
                num_refused += 1
                faults[end.episode_id] = fault
            else:
                ends.append((actor_id, end))
                ended_here.add(end.episode_id)
    connection.executemany("INSERT OR IGNORE INTO steps VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)", rows)
    ended = [
        new
        for actor_id, end in ends
        if (
            new := end_episode(
                connection, actor_id, end, faults.get(end.episode_id, ""), limits, now
            )
        )
    ]
    connection.executemany(
        "INSERT INTO actors VALUES (?, '', ?, ?, ?) ON CONFLICT (actor_id) DO UPDATE "
        "SET last_sequence = excluded.last_sequence, last_seen = excluded.last_seen",
        [(actor_id, sequence, now, now) for actor_id, sequence in last_sequences.items()],
    )
    last_fault = ": ".join(list(faults.items())[-1]) if faults else ""
    return Committed(tuple(ended), len(rows), num_refused, last_fault)


def _foreign(
    connection: Connection, owners: Mapping[str, str], actor_id: str, episode_id: str
) -> str:
    owner = owners.get(episode_id)
    if owner is None:  # it ended, or its actor was given up
        row = connection.execute(
            "SELECT actor_id FROM leases WHERE episode_id = ?", (episode_id,)
        ).fetchone()
        owner = row[0] if row else "nobody"
    return "" if owner == actor_id else f"delivered by {actor_id}, but leased to {owner}"


def _too_late(
    connection: Connection,
    owners: Mapping[str, str],
    ended_here: Set[str],
    episode_id: str,
) -> str:
    """An episode that has ended stays as it is: it may be trained on already."""
    if episode_id in ended_here or (
        episode_id not in owners
        and connection.execute(
            "SELECT 1 FROM episodes WHERE episode_id = ?", (episode_id,)
        ).fetchone()
    ):
        return "its episode had ended"
    return ""
