"""What a commit does inside its transaction: store what an owner delivered, close what ended.

An episode belongs to the actor that its lease went to. Records of anybody else, and steps that
cannot be training data, are refused and counted; an episode that lost a step that way ends as
incomplete. What is stored already stays as it is.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from sqlite3 import Connection

from msgspec import Struct

from capo.learner.run_rows import StepRow, blob, encode_numbers, end_fault, step_fault, step_row
from capo.protocol.messages import Delivery
from capo.protocol.records import EpisodeEnd, EpisodeStatus

TRAINABLE = (EpisodeStatus.TERMINATED, EpisodeStatus.TRUNCATED)


class EndedEpisode(Struct, frozen=True, kw_only=True):
    """An episode whose end was committed for the first time.

    `excluded` says why it is no training data ("" = it is): its failed status, `incomplete` (steps
    are missing or were refused), `empty` (it has no step) or `superseded` (the lease was
    given to somebody else meanwhile). `episode_return` is the undiscounted sum of its rewards.
    """

    episode_id: str
    lease_id: str
    attempt: int
    actor_id: str
    purpose: str
    status: EpisodeStatus
    outcome: float
    episode_return: float
    num_steps: int
    num_action_tokens: int
    min_version: int | None
    max_version: int | None
    excluded: str
    error: str


class EpisodeLimits(Struct, frozen=True):
    """What a model can read: token ids below `vocabulary_size`, sequences up to `max_length`."""

    vocabulary_size: int = 2**31
    max_length: int = 2**31


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
        if (new := _end(connection, actor_id, end, faults.get(end.episode_id, ""), limits, now))
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


def chain_fault(
    steps: Iterable[tuple[int, int, int]], final: tuple[int, int] | None, max_length: int
) -> str:
    """Why the sequences of an episode cannot be put together, "" if they can.

    `steps` are (keep, observation tokens, action tokens) in order, `final` the same of the prompt
    after the last one, without an action.
    """
    before = 0  # tokens of the full sequence so far
    parts = [*steps, *([(*final, 0)] if final is not None else [])]
    for index, (keep, num_observed, num_acted) in enumerate(parts):
        is_final = final is not None and index == len(parts) - 1
        name = "the final prompt" if is_final else f"step {index}"
        if keep > before:
            return f"{name} keeps {keep} tokens of a sequence of {before}"
        if keep + num_observed == 0:
            return f"{name} has an empty prompt"
        before = keep + num_observed + num_acted
        if before > max_length:
            return f"{name} makes a sequence of {before} tokens, but {max_length} is the longest"
    return ""


def _end(
    connection: Connection,
    actor_id: str,
    end: EpisodeEnd,
    fault: str,
    limits: EpisodeLimits,
    now: float,
) -> EndedEpisode | None:
    (lease_id, attempt, purpose, lease_status, newest_attempt) = connection.execute(
        "SELECT lease_id, attempt, purpose, status, (SELECT MAX(attempt) FROM leases AS other "
        "WHERE other.lease_id = mine.lease_id) FROM leases AS mine WHERE episode_id = ?",
        (end.episode_id,),
    ).fetchone()
    (num_steps, span, num_tokens, episode_return, min_version, max_version) = connection.execute(
        "SELECT COUNT(*), IFNULL(MAX(step_index) + 1, 0), TOTAL(num_action_tokens), "
        "TOTAL(reward), MIN(min_version), MAX(max_version) FROM steps WHERE episode_id = ?",
        (end.episode_id,),
    ).fetchone()
    fault = end_fault(end, limits.vocabulary_size) or fault
    if not fault and 0 < num_steps == span:
        steps = connection.execute(
            "SELECT keep, LENGTH(observation) / 4, num_action_tokens FROM steps "
            "WHERE episode_id = ? ORDER BY step_index",
            (end.episode_id,),
        )
        observed = end.final_observation
        final = None if observed is None else (end.final_keep, len(observed))
        fault = chain_fault(steps, final, limits.max_length)
    if newest_attempt > attempt or lease_status == "closed":
        excluded = "superseded"
    elif end.status not in TRAINABLE:
        excluded = end.status.value
    elif fault or not num_steps == span == end.num_steps:
        excluded = "incomplete"
        fault = fault or f"{num_steps} of {end.num_steps} steps arrived"
    else:
        excluded = "" if num_steps else "empty"
    ended = EndedEpisode(
        episode_id=end.episode_id,
        lease_id=lease_id,
        attempt=attempt,
        actor_id=actor_id,
        purpose=purpose,
        status=end.status,
        outcome=0.0 if end_fault(end, limits.vocabulary_size) else end.outcome,
        episode_return=episode_return,
        num_steps=num_steps,
        num_action_tokens=int(num_tokens),
        min_version=min_version,
        max_version=max_version,
        excluded=excluded,
        error=end.error or fault,
    )
    cursor = connection.execute(
        "INSERT OR IGNORE INTO episodes VALUES (NULL,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,NULL,?)",
        (
            ended.episode_id,
            lease_id,
            attempt,
            actor_id,
            purpose,
            end.status.value,
            ended.outcome,
            episode_return,
            num_steps,
            ended.num_action_tokens,
            min_version,
            max_version,
            0 if end_fault(end, limits.vocabulary_size) else end.final_keep,
            None if end.final_observation is None else blob(end.final_observation, "<i4"),
            encode_numbers(end.metrics),
            ended.error,
            now,
            excluded,
        ),
    )
    if not cursor.rowcount:
        return None
    if excluded != "superseded":
        connection.execute(
            "UPDATE leases SET status = ?, ended_at = ? WHERE episode_id = ?",
            (excluded or end.status.value, now, end.episode_id),
        )
    return ended
