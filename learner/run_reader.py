"""Reading a run file: at any time, also while a learner writes it, and without torch.

A reader belongs to the thread that opened it. What it returns are records; blobs become read-only
arrays.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from msgspec import Struct

from capo.configs.load import from_json
from capo.configs.schema import RunConfig
from capo.learner import run_database
from capo.learner.episodes import Episode
from capo.learner.run_rows import decode_numbers, end_record, step_record
from capo.learner.run_schema import FILE_NAME
from capo.protocol.errors import RunFileError

STEP_COLUMNS = (
    "episode_id, step_index, keep, num_action_tokens, min_version, max_version, reward, "
    "state_key, versions, info, observation, action, behaviour_logprobs, entropies"
)


CONFIG_SINCE = "config@"


class LeaseRow(Struct, frozen=True, array_like=True):
    """One attempt at one lease."""

    episode_id: str
    lease_id: str
    attempt: int
    number: int
    task_id: str
    group_id: str
    member: int
    purpose: str
    seed: int
    policy_version: int
    actor_id: str
    status: str
    granted_at: float
    ended_at: float | None


class EpisodeRow(Struct, frozen=True, array_like=True):
    """An ended episode without its steps. `consumed_by` is the update that trained on it."""

    arrival: int
    episode_id: str
    lease_id: str
    attempt: int
    actor_id: str
    purpose: str
    status: str
    outcome: float
    episode_return: float
    num_steps: int
    num_action_tokens: int
    min_version: int | None
    max_version: int | None
    error: str
    received_at: float
    consumed_by: int | None
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


class ActorRow(Struct, frozen=True, array_like=True):
    """An actor and what it has done, as far as it is stored."""

    actor_id: str
    name: str
    last_sequence: int
    first_seen: float
    last_seen: float
    num_leases: int
    num_episodes: int
    num_action_tokens: int


class EvaluationRow(Struct, frozen=True):
    """`results` is JSON by mode, "{}" while it runs."""

    number: int
    version: int
    modes: tuple[str, ...]
    task_ids: tuple[str, ...]
    started_at: float
    finished_at: float | None
    results: str


class WeightsRow(Struct, frozen=True, array_like=True):
    """A checkpoint that was written once; `folder` is relative to the run's."""

    version: int
    folder: str
    digest: str
    saved_at: float


class RunReader:
    """A context manager. `path` is the run's folder, or the file itself."""

    def __init__(self, path: Path) -> None:
        self.path = path if path.is_file() else path / FILE_NAME
        self._connection = run_database.open_readable(self.path)

    def __enter__(self) -> "RunReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def facts(self) -> dict[str, str]:
        """The rows of table `run`: run_id, config, versions, ..."""
        return dict(self._rows("SELECT key, value FROM run ORDER BY key"))

    def config(self, version: int | None = None) -> RunConfig:
        """What the update from `version` ran with; the newest one where None is given.

        A run that went on with other values has a fact `config@VERSION` from there on. Raises
        RunFileError for one that another version of capo-rl wrote, and this one cannot read.
        """
        facts = self.facts()
        try:
            since = {0: facts["config"]}
            for key, value in facts.items():
                if key.startswith(CONFIG_SINCE):
                    since[int(key.removeprefix(CONFIG_SINCE))] = value
            newest = max(start for start in since if version is None or start <= version)
            return from_json(since[newest].encode())
        except (msgspec.DecodeError, KeyError) as error:
            raise RunFileError(
                f"{self.path} holds a configuration that this version of capo-rl cannot read "
                f"({error}); it was written by {facts.get('version.capo-rl', 'another one')}."
            ) from error

    def leases(self) -> list[LeaseRow]:
        """All attempts, in the order they were granted."""
        return [
            LeaseRow(*row)
            for row in self._rows(f"SELECT {_columns(LeaseRow)} FROM leases ORDER BY rowid")
        ]

    def episodes(self) -> list[EpisodeRow]:
        """All ended episodes, in the order they were committed."""
        return [
            EpisodeRow(*row)
            for row in self._rows(f"SELECT {_columns(EpisodeRow)} FROM episodes ORDER BY arrival")
        ]

    def read_episodes(self, episode_ids: Sequence[str]) -> list[Episode]:
        """Whole episodes in the order asked for, ready to train on."""
        return [self._episode(episode_id) for episode_id in episode_ids]

    def updates(self) -> list[UpdateRow]:
        rows = self._rows(
            "SELECT version, status, episode_ids, seeds, metrics, taken_at, done_at "
            "FROM updates ORDER BY version"
        )
        return [
            UpdateRow(
                version,
                status,
                msgspec.json.decode(episode_ids, type=tuple[str, ...]),
                msgspec.json.decode(seeds, type=dict[str, int]),
                decode_numbers(metrics),
                taken_at,
                done_at,
            )
            for version, status, episode_ids, seeds, metrics, taken_at, done_at in rows
        ]

    def queue_ages_s(self, version: int) -> list[float]:
        """Seconds between an episode's end being stored and the update from `version` taking it,
        for each of its episodes."""
        rows = self._rows(
            "SELECT taken_at - received_at FROM updates JOIN episodes ON consumed_by = version "
            "WHERE version = ?",
            version,
        )
        return [age_s for (age_s,) in rows]

    def update_result(self, version: int) -> bytes:
        """What `finish_update` stored. Raises RunFileError if that update is not done."""
        rows = list(self._rows("SELECT result FROM updates WHERE version = ?", version))
        if not rows or rows[0][0] is None:
            raise RunFileError(
                f"{self.path} records no finished update {version}: list them with `capo replay`."
            )
        return bytes(rows[0][0])

    def actors(self) -> list[ActorRow]:
        return [
            ActorRow(*row)
            for row in self._rows(
                "SELECT actor_id, name, last_sequence, first_seen, last_seen, "
                "(SELECT COUNT(*) FROM leases WHERE leases.actor_id = actors.actor_id), "
                "COUNT(episode_id), CAST(TOTAL(num_action_tokens) AS INTEGER) "
                "FROM actors LEFT JOIN episodes USING (actor_id) GROUP BY actor_id "
                "ORDER BY first_seen, actor_id"
            )
        ]

    def evaluations(self) -> list[EvaluationRow]:
        rows = self._rows(
            "SELECT number, version, modes, task_ids, started_at, finished_at, results "
            "FROM evaluations ORDER BY number"
        )
        return [
            EvaluationRow(
                number,
                version,
                msgspec.json.decode(modes, type=tuple[str, ...]),
                msgspec.json.decode(task_ids, type=tuple[str, ...]),
                started_at,
                finished_at,
                results,
            )
            for number, version, modes, task_ids, started_at, finished_at, results in rows
        ]

    def weights(self) -> list[WeightsRow]:
        return [
            WeightsRow(*row)
            for row in self._rows(f"SELECT {_columns(WeightsRow)} FROM weights ORDER BY version")
        ]

    def _episode(self, episode_id: str) -> Episode:
        heads = list(
            self._rows(
                "SELECT task_id, group_id, member, episodes.status, num_steps, outcome, "
                "final_keep, final_observation, metrics, error "
                "FROM episodes JOIN leases USING (episode_id) WHERE episode_id = ?",
                episode_id,
            )
        )
        if not heads:
            raise RunFileError(f"{self.path} holds no ended episode {episode_id}.")
        task_id, group_id, member, *end = heads[0]
        steps = self._rows(
            f"SELECT {STEP_COLUMNS} FROM steps WHERE episode_id = ? ORDER BY step_index", episode_id
        )
        return Episode(
            episode_id=episode_id,
            task_id=task_id,
            group_id=group_id,
            member=member,
            steps=tuple(step_record(row) for row in steps),
            end=end_record(episode_id, *end),
        )

    def _rows(self, sql: str, *parameters: str | int) -> Iterator[tuple[Any, ...]]:
        with run_database.query(self.path):
            yield from self._connection.execute(sql, parameters)


def _columns(row: type[Struct]) -> str:
    return ", ".join(row.__struct_fields__)
