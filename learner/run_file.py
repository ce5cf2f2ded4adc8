"""The writer of a run file: what the actors deliver, and what the learner decides about it.

One connection behind one lock, used from the server's writer thread and from the main thread.
Readers (`run_reader`) never wait for it. Every method is one transaction: it happens or it does
not.

Deliveries, updates and evaluations are synced to the disk before the method returns. Leases are
written before they are sent but not synced: after a power cut the last of them may be unknown, and
then what their actors deliver is refused, because an episode is accepted from its owner only.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from sqlite3 import Connection
from types import MappingProxyType

import msgspec

from capo.learner import run_database
from capo.learner.run_endings import EpisodeLimits
from capo.learner.run_ingest import Committed, store
from capo.learner.run_leases import GrantedLease, Note, apply_notes, store_leases
from capo.learner.run_rows import encode_numbers
from capo.learner.run_schema import FILE_NAME
from capo.protocol.errors import ProtocolError, RunFileError, StorageFullError
from capo.protocol.messages import Delivery

Clock = Callable[[], float]
NO_LIMITS = EpisodeLimits()
NO_FACTS: Mapping[str, str] = MappingProxyType({})
BUSY_S = 3.0  # for another transaction to end; a commit that takes longer waits for the disk


class RunFile:
    """Use `create` for a new run and `open` to go on with one; close it when the run ends."""

    def __init__(self, path: Path, connection: Connection, descriptor: int, clock: Clock) -> None:
        self.path = path
        self._connection = connection
        self._descriptor = descriptor
        self._file = os.stat(path)
        self._clock = clock
        self._lock = threading.Lock()
        with run_database.query(path):
            self._sequences: dict[str, int] = dict(
                connection.execute("SELECT actor_id, last_sequence FROM actors")
            )
            self._owners: dict[str, str] = dict(
                connection.execute(
                    "SELECT episode_id, actor_id FROM leases WHERE status = 'playing'"
                )
            )

    @classmethod
    def create(cls, run_dir: Path, facts: Mapping[str, str], clock: Clock = time.time) -> "RunFile":
        """A new run. `facts` are the rows of its `run` table: run_id, config, versions, ...

        Raises RunFileError if the folder holds a run already.
        """
        path = run_dir / FILE_NAME
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = run_database.lock(path)
        try:
            if path.exists():
                raise RunFileError(
                    f"{run_dir} already holds a run: continue it with --resume, or choose another "
                    f"run_dir."
                )
            return cls(path, run_database.create(path, facts), descriptor, clock)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, run_dir: Path, clock: Clock = time.time) -> "RunFile":
        """An existing run, to go on with it. Raises RunFileError if it is missing or damaged."""
        path = run_dir / FILE_NAME
        if not path.exists():
            raise RunFileError(
                f"{run_dir} holds no run to resume: leave out --resume, or name the right folder."
            )
        descriptor = run_database.lock(path)
        try:
            return cls(path, run_database.open_writable(path), descriptor, clock)
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Fold the log into the file, so that the run is one file again."""
        with self._lock:
            self._connection.close()
            os.close(self._descriptor)

    # What actors deliver

    def commit(
        self,
        deliveries: Sequence[tuple[str, Delivery]],
        limits: EpisodeLimits = NO_LIMITS,
    ) -> Committed:
        """Store deliveries of (actor_id, delivery) in order, in one durable transaction.

        What is stored already changes nothing; what the model could not read is refused. Raises
        ProtocolError if an actor's deliveries have a gap, StorageFullError if there is no room;
        nothing is stored then.
        """
        with self._lock:
            sequences = dict[str, int]()
            fresh = list[tuple[str, Delivery]]()
            for actor_id, delivery in deliveries:
                last = sequences.get(actor_id, self._sequences.get(actor_id, 0))
                if delivery.sequence <= last:
                    continue
                if delivery.sequence != last + 1:
                    raise ProtocolError(
                        f"Actor {actor_id} sent delivery {delivery.sequence} after {last}: "
                        f"restart that actor, deliveries between them are missing."
                    )
                sequences[actor_id] = delivery.sequence
                fresh.append((actor_id, delivery))
            if not fresh:
                return Committed()
            with run_database.transaction(self.path, self._connection, synced=True):
                committed = store(self._connection, self._owners, fresh, limits, self._clock())
            self._sequences.update(sequences)
            for ended in committed.ended:
                self._owners.pop(ended.episode_id, None)
            return committed

    def last_sequence(self, actor_id: str) -> int:
        """The last delivery of this actor that is stored; 0 = none."""
        return self._sequences.get(actor_id, 0)

    def actors_before(self) -> set[str]:
        """The actors that this run knew when it was opened, or has stored deliveries of."""
        return set(self._sequences)

    def actor_seen(self, actor_id: str, name: str) -> None:
        now = self._clock()
        with self._transaction(synced=False) as connection:
            connection.execute(
                "INSERT INTO actors VALUES (?, ?, 0, ?, ?) ON CONFLICT (actor_id) DO UPDATE "
                "SET name = excluded.name, last_seen = excluded.last_seen",
                (actor_id, name, now, now),
            )

    # What the scheduler decides

    def record_leases(self, granted: Sequence[GrantedLease], notes: Sequence[Note] = ()) -> None:
        """Remember who plays what, and what became of episodes, before anybody is told."""
        now = self._clock()
        with self._transaction(synced=False) as connection:
            store_leases(connection, granted, now)
            apply_notes(connection, notes, now)
        self._owners.update({grant.lease.episode_id: grant.actor_id for grant in granted})
        for note in notes:
            if note.lease_status not in (None, "playing"):
                self._owners.pop(note.episode_id, None)  # it is looked up if records still come

    def begin_update(
        self,
        version: int,
        episode_ids: Sequence[str],
        notes: Sequence[Note] = (),
        facts: Mapping[str, str] = NO_FACTS,
    ) -> None:
        """The update that starts from policy `version` takes these episodes, in this order; with
        `facts` that change with it.

        Taking the same again (after a crash) is no change; taking others raises RunFileError, and
        so does a run whose folder was moved or removed, or that another learner took.
        """
        self._require_place()
        now = self._clock()
        encoded = msgspec.json.encode(list(episode_ids)).decode()
        with self._transaction(synced=True) as connection:
            for (recorded,) in connection.execute(
                "SELECT episode_ids FROM updates WHERE version = ?", (version,)
            ).fetchall():
                if recorded != encoded:
                    raise RunFileError(
                        f"Update {version} of {self.path} already took other episodes: resume the "
                        f"run from a checkpoint instead of starting it again."
                    )
            connection.execute(
                "INSERT INTO updates VALUES (?, 'taken', ?, '{}', '{}', NULL, ?, NULL) "
                "ON CONFLICT (version) DO UPDATE SET status = 'taken'",
                (version, encoded, now),
            )
            connection.executemany(
                "UPDATE episodes SET consumed_by = ? WHERE episode_id = ?",
                [(version, episode_id) for episode_id in episode_ids],
            )
            apply_notes(connection, notes, now)
            _store_facts(connection, facts)

    def finish_update(
        self,
        version: int,
        *,
        seeds: Mapping[str, int],
        metrics: Mapping[str, float],
        result: bytes,
    ) -> None:
        """The update is done. `result` is what a replay must reproduce (learner/results.py)."""
        with self._transaction(synced=True) as connection:
            cursor = connection.execute(
                "UPDATE updates SET status = 'done', seeds = ?, metrics = ?, result = ?, "
                "done_at = ? WHERE version = ?",
                (
                    msgspec.json.encode(dict(seeds)).decode(),
                    encode_numbers(dict(metrics)),
                    result,
                    self._clock(),
                    version,
                ),
            )
            if cursor.rowcount != 1:
                raise ValueError(f"update {version} was never begun")

    def record_weights(self, version: int, folder: str, digest: str) -> None:
        """The checkpoint of a policy version; `folder` is relative to the run's."""
        with self._transaction(synced=True) as connection:
            connection.execute(
                "INSERT OR REPLACE INTO weights VALUES (?, ?, ?, ?)",
                (version, folder, digest, self._clock()),
            )

    def begin_evaluation(self, version: int, modes: Sequence[str], task_ids: Sequence[str]) -> int:
        """The number of a new evaluation."""
        with self._transaction(synced=True) as connection:
            cursor = connection.execute(
                "INSERT INTO evaluations VALUES (NULL, ?, ?, ?, ?, NULL, '{}')",
                (
                    version,
                    msgspec.json.encode(list(modes)).decode(),
                    msgspec.json.encode(list(task_ids)).decode(),
                    self._clock(),
                ),
            )
            assert cursor.lastrowid is not None
            return cursor.lastrowid

    def finish_evaluation(self, number: int, results: bytes) -> None:
        """`results` is a JSON object by mode."""
        with self._transaction(synced=True) as connection:
            connection.execute(
                "UPDATE evaluations SET results = ?, finished_at = ? WHERE number = ?",
                (results.decode(), self._clock(), number),
            )

    def set_facts(self, facts: Mapping[str, str]) -> None:
        """Add or replace rows of the `run` table."""
        with self._transaction(synced=True) as connection:
            _store_facts(connection, facts)

    def _require_place(self) -> None:
        """What is written after the file lost its name could never be resumed."""
        try:
            in_place = os.path.samestat(os.stat(self.path), self._file)
        except FileNotFoundError:
            in_place = False
        if not in_place:
            raise RunFileError(
                f"{self.path} is not there any more: the folder of a run that goes on was moved or "
                f"removed; resume it where it is now."
            )
        if not run_database.holds_lock(self.path, self._descriptor):  # somebody removed it
            descriptor = run_database.lock(self.path)
            os.close(self._descriptor)
            self._descriptor = descriptor

    @contextlib.contextmanager
    def _transaction(self, *, synced: bool) -> Iterator[Connection]:
        """StorageFullError if another transaction does not end: no caller hangs with the disk."""
        if not self._lock.acquire(timeout=BUSY_S):
            raise StorageFullError(f"the disk of {self.path} has not answered for {BUSY_S:g} s")
        try:
            with run_database.transaction(self.path, self._connection, synced=synced) as connection:
                yield connection
        finally:
            self._lock.release()


def _store_facts(connection: Connection, facts: Mapping[str, str]) -> None:
    connection.executemany("INSERT OR REPLACE INTO run VALUES (?, ?)", list(facts.items()))
