"""How an episode ends in the run file: whether it is whole, and whether anybody waits for it still.

Its functions read and write inside a transaction that the caller holds.
"""

from collections.abc import Iterable
from sqlite3 import Connection

from msgspec import Struct, structs

from capo.learner.run_rows import blob, encode_numbers, end_fault
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


def end_episode(
    connection: Connection,
    actor_id: str,
    end: EpisodeEnd,
    fault: str,
    limits: EpisodeLimits,
    now: float,
) -> EndedEpisode | None:
    """Close an episode; None if it had ended already. `fault` is that of a refused step."""
    lease = _lease(connection, end.episode_id)
    steps = _stored_steps(connection, end.episode_id)
    unbelievable = end_fault(end, limits.vocabulary_size)
    fault = unbelievable or fault
    if not fault and 0 < steps.num_steps == steps.span:
        fault = _chain_fault(connection, end, limits.max_length)
    excluded = _exclusion(lease, steps, end, fault)
    if excluded == "incomplete":
        fault = fault or f"{steps.num_steps} of {end.num_steps} steps arrived"
    ended = EndedEpisode(
        episode_id=end.episode_id,
        lease_id=lease.lease_id,
        attempt=lease.attempt,
        actor_id=actor_id,
        purpose=lease.purpose,
        status=end.status,
        outcome=0.0 if unbelievable else end.outcome,
        episode_return=steps.episode_return,
        num_steps=steps.num_steps,
        num_action_tokens=int(steps.num_action_tokens),
        min_version=steps.min_version,
        max_version=steps.max_version,
        excluded=excluded,
        error=end.error or fault,
    )
    final_keep = 0 if unbelievable else end.final_keep
    if not _insert_episode(connection, ended, end, final_keep, now):
        return None
    if excluded != "superseded":
        connection.execute(
            "UPDATE leases SET status = ?, ended_at = ? WHERE episode_id = ?",
            (excluded or end.status.value, now, end.episode_id),
        )
    return ended


class _Lease(Struct, frozen=True):
    lease_id: str
    attempt: int
    purpose: str
    status: str
    newest_attempt: int


class _StoredSteps(Struct, frozen=True):
    """The steps of an episode that are stored; they have no gap if `span` is their number."""

    num_steps: int
    span: int
    num_action_tokens: float
    episode_return: float
    min_version: int | None
    max_version: int | None


def _lease(connection: Connection, episode_id: str) -> _Lease:
    return _Lease(
        *connection.execute(
            "SELECT lease_id, attempt, purpose, status, (SELECT MAX(attempt) FROM leases AS other "
            "WHERE other.lease_id = mine.lease_id) FROM leases AS mine WHERE episode_id = ?",
            (episode_id,),
        ).fetchone()
    )


def _stored_steps(connection: Connection, episode_id: str) -> _StoredSteps:
    return _StoredSteps(
        *connection.execute(
            "SELECT COUNT(*), IFNULL(MAX(step_index) + 1, 0), TOTAL(num_action_tokens), "
            "TOTAL(reward), MIN(min_version), MAX(max_version) FROM steps WHERE episode_id = ?",
            (episode_id,),
        ).fetchone()
    )


def _chain_fault(connection: Connection, end: EpisodeEnd, max_length: int) -> str:
    steps = connection.execute(
        "SELECT keep, LENGTH(observation) / 4, num_action_tokens FROM steps "
        "WHERE episode_id = ? ORDER BY step_index",
        (end.episode_id,),
    )
    observed = end.final_observation
    final = None if observed is None else (end.final_keep, len(observed))
    return chain_fault(steps, final, max_length)


def _exclusion(lease: _Lease, steps: _StoredSteps, end: EpisodeEnd, fault: str) -> str:
    """Why an episode is no training data, "" if it is."""
    if lease.newest_attempt > lease.attempt or lease.status == "closed":
        return "superseded"
    if end.status not in TRAINABLE:
        return end.status.value
    if fault or not steps.num_steps == steps.span == end.num_steps:
        return "incomplete"
    return "" if steps.num_steps else "empty"


def _insert_episode(
    connection: Connection, ended: EndedEpisode, end: EpisodeEnd, final_keep: int, now: float
) -> bool:
    """Every field of `ended` is a column. Returns whether the episode was not there yet."""
    observed = end.final_observation
    row = {
        **structs.asdict(ended),
        "status": ended.status.value,
        "final_keep": final_keep,
        "final_observation": None if observed is None else blob(observed, "<i4"),
        "metrics": encode_numbers(end.metrics),
        "received_at": now,
    }
    columns, values = ", ".join(row), ", ".join(f":{column}" for column in row)
    cursor = connection.execute(
        f"INSERT OR IGNORE INTO episodes ({columns}) VALUES ({values})", row
    )
    return cursor.rowcount == 1


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
