"""SQLite as a run file needs it: opened, recognised, locked, and with errors in plain words.

Knows which pragmas make a commit durable; knows nothing of what the tables hold.

WAL keeps readers and the writer out of each other's way. `synchronous=FULL` syncs the log at every
commit, so that what was acked outlives a power cut and not only a killed process. `NORMAL` outlives
the killed process alone; it is enough where a loss is noticed and harmless (see RunFile). The order
of the log is kept either way: a later commit never survives an earlier one.
"""

import contextlib
import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

from capo.learner.run_schema import APPLICATION_ID, FILE_NAME, SCHEMA_VERSION, TABLES
from capo.protocol.errors import RunFileError, StorageFullError

LOCK_NAME = "run.lock"
PAGE_BYTES = 16384  # a step of ~1,500 prompt tokens fits; measured with benchmarks/ingest.py
CHECKPOINT_PAGES = 4096  # of the log, before it is folded into the database: 64 MiB
FULL_DISK_BYTES = 1 << 20  # an I/O error with less room than this is a full disk


def create(path: Path, facts: Mapping[str, str]) -> sqlite3.Connection:
    """A new run file with `facts` as its table `run`; `path` must not exist. It appears complete or
    not at all, so what exists can be resumed."""
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)
    with _plain_errors(path):
        connection = sqlite3.connect(beside, isolation_level=None)
        connection.executescript(
            f"PRAGMA page_size = {PAGE_BYTES}; PRAGMA application_id = {APPLICATION_ID};"
            f"PRAGMA user_version = {SCHEMA_VERSION}; BEGIN; {TABLES} COMMIT;"
        )
        connection.executemany("INSERT INTO run VALUES (?, ?)", list(facts.items()))
        connection.close()
        os.rename(beside, path)
        return _writable(path)


def open_writable(path: Path) -> sqlite3.Connection:
    """An existing run file, checked page by page before the first write."""
    with contextlib.closing(open_readable(path)) as reader, _plain_errors(path):
        [(verdict,)] = reader.execute("PRAGMA quick_check(1)").fetchall()
    if verdict != "ok":
        raise damaged(path, str(verdict).replace("\n", " "))
    with _plain_errors(path):
        return _writable(path)


def open_readable(path: Path) -> sqlite3.Connection:
    """A read-only connection, at any time, also while a learner writes; for one thread."""
    if not path.is_file():
        raise RunFileError(f"{path.parent} holds no run: there is no {FILE_NAME} in it.")
    options = "mode=ro"
    if not os.access(path.parent, os.W_OK) and not path.with_name(path.name + "-wal").exists():
        options += "&immutable=1"  # a finished run on a read-only medium
    uri = f"{path.absolute().as_uri()}?{options}"
    with _plain_errors(path):
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30.0)
    try:
        _recognise(path, connection)
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def transaction(
    path: Path, connection: sqlite3.Connection, *, synced: bool
) -> Iterator[sqlite3.Connection]:
    """All of the block or nothing. `synced`: it outlives a power cut once this returns.

    Raises StorageFullError when the disk is full; the connection stays usable, and the same
    transaction can be tried again when there is room.
    """
    with _plain_errors(path):
        connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # SQLite rolls back by itself after some errors
                connection.execute("ROLLBACK")
            raise


@contextlib.contextmanager
def query(path: Path) -> Iterator[None]:
    """Reads inside the block raise RunFileError, not SQLite's errors."""
    with _plain_errors(path):
        yield


def lock(path: Path) -> int:
    """Take the run for this process; returns a descriptor that holds it until closed or death."""
    descriptor = os.open(path.with_name(LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise RunFileError(
            f"{path.parent} is in use by another learner (process {owner}): stop that one, or "
            f"choose another run_dir."
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def holds_lock(path: Path, descriptor: int) -> bool:
    """Whether the lock that others would try is still the one that `descriptor` holds."""
    try:
        return os.path.samestat(os.stat(path.with_name(LOCK_NAME)), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _writable(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, isolation_level=None, timeout=30.0, check_same_thread=False, cached_statements=64
    )
    connection.executescript(
        f"PRAGMA journal_mode = WAL; PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES};"
        f"PRAGMA journal_size_limit = {64 << 20}; PRAGMA temp_store = MEMORY;"
    )
    return connection


def _recognise(path: Path, connection: sqlite3.Connection) -> None:
    with _plain_errors(path):
        [(application_id,)] = connection.execute("PRAGMA application_id").fetchall()
        [(schema_version,)] = connection.execute("PRAGMA user_version").fetchall()
        [(page_bytes,)] = connection.execute("PRAGMA page_size").fetchall()
        [(num_pages,)] = connection.execute("PRAGMA page_count").fetchall()
    if application_id != APPLICATION_ID:
        raise RunFileError(
            f"{path} is no run file of this program; it was left as it is: choose another run_dir."
        )
    if schema_version != SCHEMA_VERSION:
        raise RunFileError(
            f"{path} has schema version {schema_version}, this program reads {SCHEMA_VERSION}: "
            f"open it with the version of capo that wrote it."
        )
    logged = path.with_name(path.name + "-wal")
    size = path.stat().st_size
    if not (logged.exists() and logged.stat().st_size) and size < page_bytes * num_pages:
        raise damaged(path, f"it has {size} of {page_bytes * num_pages} bytes")
    with _plain_errors(path):
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    if not {"run", "leases", "episodes", "steps", "updates"} <= tables:
        raise damaged(path, "tables are missing")


def damaged(path: Path, detail: str) -> RunFileError:
    """The sentence for a file that holds what no writer of ours has written."""
    return RunFileError(
        f"{path} is damaged ({detail}); it was left as it is: restore a copy of it, or start a new "
        f"run in another run_dir."
    )


@contextlib.contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise _translated(path, error) from error
    except UnicodeDecodeError as error:  # of a name in the schema, or of SQLite's own message
        raise damaged(path, "a text in it is not UTF-8") from error


def _translated(path: Path, error: sqlite3.Error) -> RunFileError:
    primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if primary == sqlite3.SQLITE_FULL or (
        primary == sqlite3.SQLITE_IOERR and _free_bytes(path) < FULL_DISK_BYTES
    ):
        return StorageFullError(
            f"The disk that holds {path} is full: make room, what was committed is safe and the "
            f"run goes on by itself."
        )
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return damaged(path, str(error))
    if str(error).startswith("Could not decode"):  # bytes of a text column were changed
        return damaged(path, "a text in it is not UTF-8")
    if primary == sqlite3.SQLITE_BUSY:
        return RunFileError(f"{path} was locked for 30 s by another program: close it, then retry.")
    if primary == sqlite3.SQLITE_CANTOPEN:
        return RunFileError(f"{path} cannot be opened: check that the folder can be written.")
    return RunFileError(f"{path} could not be read or written ({error}).")


def _free_bytes(path: Path) -> int:
    try:
        room = os.statvfs(path.parent)
    except OSError as error:
        return 0 if error.errno == errno.ENOSPC else FULL_DISK_BYTES
    return room.f_bavail * room.f_frsize
