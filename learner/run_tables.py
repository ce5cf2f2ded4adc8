"""The rows of a run file as a reader gives them: every column of its type and within its range.

A file whose bytes were changed may hold anything in any column, so rows are converted, not trusted.
"""

from typing import Annotated

from msgspec import Meta, Struct

from capo.learner.evaluation_round import ModeResult
from capo.protocol.records import EpisodeStatus, Purpose

Count = Annotated[int, Meta(ge=0, lt=2**31)]
UnixTime = Annotated[float, Meta(ge=0.0, lt=253_402_300_800.0)]  # to the year 9999


class LeaseRow(Struct, frozen=True, array_like=True):
    """One attempt at one lease."""

    episode_id: str
    lease_id: str
    attempt: Count
    number: Count
    task_id: str
    group_id: str
    member: Count
    purpose: Purpose
    seed: int
    policy_version: int
    actor_id: str
    status: str
    granted_at: UnixTime
    ended_at: UnixTime | None


class EpisodeRow(Struct, frozen=True, array_like=True):
    """An ended episode without its steps. `consumed_by` is the update that trained on it."""

    arrival: int
    episode_id: str
    lease_id: str
    attempt: Count
    actor_id: str
    purpose: Purpose
    status: EpisodeStatus
    outcome: float
    episode_return: float
    num_steps: Count
    num_action_tokens: int
    min_version: int | None
    max_version: int | None
    error: str
    received_at: UnixTime
    consumed_by: Count | None
    excluded: str


class UpdateRow(Struct, frozen=True):
    """An update that starts from policy `version`. `status` is taken or done."""

    version: int
    status: str
    episode_ids: tuple[str, ...]
    seeds: dict[str, int]
    metrics: dict[str, float]
    taken_at: float
    done_at: float | None


# What `updates` has for an UpdateRow: three columns are JSON.
UpdateColumns = tuple[Count, str, str, str, str, UnixTime, UnixTime | None]


class ActorRow(Struct, frozen=True, array_like=True):
    """An actor and what it has done, as far as it is stored."""

    actor_id: str
    name: str
    last_sequence: int
    first_seen: UnixTime
    last_seen: UnixTime
    num_leases: int
    num_episodes: int
    num_action_tokens: int


class EvaluationRow(Struct, frozen=True):
    """`results` are by mode; there is none while it runs."""

    number: int
    version: int
    modes: tuple[str, ...]
    task_ids: tuple[str, ...]
    started_at: float
    finished_at: float | None
    results: dict[str, ModeResult]


# What `evaluations` has for an EvaluationRow: three columns are JSON.
EvaluationColumns = tuple[int, Count, str, str, UnixTime, UnixTime | None, str]


class WeightsRow(Struct, frozen=True, array_like=True):
    """A checkpoint that was written once; `folder` is relative to the run's."""

    version: Count
    folder: str
    digest: str
    saved_at: UnixTime
