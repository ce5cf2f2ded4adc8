"""Reading a run file: at any time, also while a learner writes it, and without torch.

A reader belongs to the thread that opened it. What it returns are records; blobs become read-only
arrays. What does not fit its record was damaged: every method raises RunFileError then.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from capo.configs.load import from_json
from capo.configs.schema import RunConfig
from capo.learner import run_database
from capo.learner.episodes import Episode
from capo.learner.evaluation_round import ModeResult
from capo.learner.run_rows import (
    EndColumns,
    StepRow,
    decode_numbers,
    end_record,
    step_fault,
    step_record,
)
from capo.learner.run_schema import FILE_NAME
from capo.learner.run_tables import (
    ActorRow,
    EpisodeRow,
    EvaluationColumns,
    EvaluationRow,
    LeaseRow,
    UpdateColumns,
    UpdateRow,
    WeightsRow,
)
from capo.protocol.errors import RunFileError
from capo.protocol.records import Step

STEP_COLUMNS = (
    "episode_id, step_index, keep, num_action_tokens, min_version, max_version, reward, "
    "state_key, versions, info, observation, action, behaviour_logprobs, entropies"
)

CONFIG_SINCE = "config@"
ANY_TOKEN = 2**31

Row = TypeVar("Row", bound=Struct)


class RunReader:
    """A context manager. `path` is the run's folder, or the file itself."""

    def __init__(self, path: Path) -> None:
        self.path = path if path.is_file() else path / FILE_NAME
        self._connection = run_database.open_readable(self.path)

    def __enter__(self) -> "RunReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def facts(self) -> dict[str, str]:
        """The rows of table `run`: run_id, config, versions, ..."""
        with self._undamaged():
            return msgspec.convert(
                dict(self._rows("SELECT key, value FROM run ORDER BY key")), dict[str, str]
            )

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
        except (ValueError, KeyError) as error:
            raise RunFileError(
                f"{self.path} holds a configuration that this version of capo-rl cannot read "
                f"({error}); it was written by {facts.get('version.capo-rl', 'another one')}."
            ) from error

    def leases(self) -> list[LeaseRow]:
        """All attempts, in the order they were granted."""
        return self._records(LeaseRow, f"SELECT {_columns(LeaseRow)} FROM leases ORDER BY rowid")

    def episodes(self) -> list[EpisodeRow]:
        """All ended episodes, in the order they were committed."""
        return self._records(
            EpisodeRow, f"SELECT {_columns(EpisodeRow)} FROM episodes ORDER BY arrival"
        )

    def read_episodes(
        self, episode_ids: Sequence[str], vocabulary_size: int = ANY_TOKEN
    ) -> list[Episode]:
        """Whole episodes in the order asked for, ready to train on with such a vocabulary."""
        return [self._episode(episode_id, vocabulary_size) for episode_id in episode_ids]

    def updates(self) -> list[UpdateRow]:
        """All updates that took a batch, by version."""
        rows = self._rows(
            "SELECT version, status, episode_ids, seeds, metrics, taken_at, done_at "
            "FROM updates ORDER BY version"
        )
        with self._undamaged():
            return [_update(msgspec.convert(row, UpdateColumns)) for row in rows]

    def history(self, version: int) -> list[UpdateRow]:
        """The updates that made policy `version`. Raises RunFileError if one is not recorded: a
        checkpoint is written after its update."""
        done = [row for row in self.updates() if row.version < version and row.status == "done"]
        if len(done) < version:
            raise RunFileError(
                f"{self.path} has {len(done)} of the {version} updates that its checkpoint of "
                f"version {version} comes from: its end is missing, as in a copy without "
                f"{FILE_NAME}-wal; restore that, or the whole run directory."
            )
        return done

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
        rows = self._rows("SELECT result FROM updates WHERE version = ?", version)
        if not rows or rows[0][0] is None:
            raise RunFileError(
                f"{self.path} records no finished update {version}: list them with `capo replay`."
            )
        if not isinstance(rows[0][0], bytes):
            raise run_database.damaged(self.path, f"the result of update {version} is no blob")
        return rows[0][0]

    def actors(self) -> list[ActorRow]:
        """All actors that were ever connected, first one first."""
        return self._records(
            ActorRow,
            "SELECT actor_id, name, last_sequence, first_seen, last_seen, "
            "(SELECT COUNT(*) FROM leases WHERE leases.actor_id = actors.actor_id), "
            "COUNT(episode_id), CAST(TOTAL(num_action_tokens) AS INTEGER) "
            "FROM actors LEFT JOIN episodes USING (actor_id) GROUP BY actor_id "
            "ORDER BY first_seen, actor_id",
        )

    def evaluations(self) -> list[EvaluationRow]:
        """All evaluations, also one that is going on, in the order they began."""
        rows = self._rows(
            "SELECT number, version, modes, task_ids, started_at, finished_at, results "
            "FROM evaluations ORDER BY number"
        )
        with self._undamaged():
            return [_evaluation(msgspec.convert(row, EvaluationColumns)) for row in rows]

    def weights(self) -> list[WeightsRow]:
        """All checkpoints that were ever written, by version; older ones may be gone."""
        return self._records(
            WeightsRow, f"SELECT {_columns(WeightsRow)} FROM weights ORDER BY version"
        )

    def _episode(self, episode_id: str, vocabulary_size: int) -> Episode:
        heads = self._rows(
            "SELECT task_id, group_id, member, episodes.status, num_steps, outcome, "
            "final_keep, final_observation, metrics, error "
            "FROM episodes JOIN leases USING (episode_id) WHERE episode_id = ?",
            episode_id,
        )
        if not heads:
            raise RunFileError(f"{self.path} holds no ended episode {episode_id}.")
        rows = self._rows(
            f"SELECT {STEP_COLUMNS} FROM steps WHERE episode_id = ? ORDER BY step_index", episode_id
        )
        with self._undamaged():
            task_id, group_id, member = msgspec.convert(heads[0][:3], tuple[str, str, int])
            return Episode(
                episode_id=episode_id,
                task_id=task_id,
                group_id=group_id,
                member=member,
                steps=tuple(_step(row, vocabulary_size) for row in rows),
                end=end_record(episode_id, *msgspec.convert(heads[0][3:], EndColumns)),
            )

    def _records(self, row: type[Row], sql: str) -> list[Row]:
        with self._undamaged():
            return [msgspec.convert(columns, row) for columns in self._rows(sql)]

    def _rows(self, sql: str, *parameters: str | int) -> list[tuple[Any, ...]]:
        with run_database.query(self.path):
            return self._connection.execute(sql, parameters).fetchall()

    @contextlib.contextmanager
    def _undamaged(self) -> Iterator[None]:
        """What cannot be decoded inside the block is the file's fault."""
        try:
            yield
        except ValueError as error:  # msgspec's, numpy's and our own
            raise run_database.damaged(self.path, str(error)) from error


def _update(columns: UpdateColumns) -> UpdateRow:
    version, status, episode_ids, seeds, metrics, taken_at, done_at = columns
    return UpdateRow(
        version,
        status,
        msgspec.json.decode(episode_ids, type=tuple[str, ...]),
        msgspec.json.decode(seeds, type=dict[str, int]),
        decode_numbers(metrics),
        taken_at,
        done_at,
    )


def _evaluation(columns: EvaluationColumns) -> EvaluationRow:
    number, version, modes, task_ids, started_at, finished_at, results = columns
    return EvaluationRow(
        number,
        version,
        msgspec.json.decode(modes, type=tuple[str, ...]),
        msgspec.json.decode(task_ids, type=tuple[str, ...]),
        started_at,
        finished_at,
        msgspec.json.decode(results, type=dict[str, ModeResult]),
    )


def _step(columns: tuple[Any, ...], vocabulary_size: int) -> Step:
    """What got into the file was a step without fault."""
    step = step_record(msgspec.convert(columns, StepRow))
    if fault := step_fault(step, vocabulary_size):
        raise ValueError(f"step {step.index} of episode {step.episode_id}: {fault}")
    return step


def _columns(row: type[Struct]) -> str:
    return ", ".join(row.__struct_fields__)
