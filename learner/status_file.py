"""RUN/status.json: who waits for whom and since when, written every second while a learner runs."""

import contextlib
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from capo.learner.scheduler_status import SchedulerStatus, Wait
from capo.protocol.errors import RunFileError
from capo.protocol.sayings import plain

FILE_NAME = "status.json"
PAGE_BYTES = 4096  # the file is padded with spaces to whole pages,
SPARE_BYTES = 1024  # and with at least so many, so that a full disk has room for the next one
READ_ATTEMPTS = 3


class ActorStatus(Struct, frozen=True, kw_only=True):
    """One actor as the learner sees it. `waiting_for` is the actor's own word."""

    actor_id: str
    name: str
    ready: bool
    weights_version: int
    playing: int
    capacity: int
    waiting_for: str
    connected_s: float
    silent_s: float  # since its last heartbeat
    metrics: dict[str, float]


class LearnerStatus(Struct, frozen=True, kw_only=True):
    """`doing` is what the main thread is at, since `doing_s` seconds before `written_at`."""

    written_at: float  # unix time
    pid: int
    doing: str
    doing_s: float
    scheduler: SchedulerStatus
    actors: tuple[ActorStatus, ...]
    waits: tuple[Wait, ...] = ()  # of a broadcast or a slow commit that goes on


def write_status(run_dir: Path, status: LearnerStatus) -> None:
    """Replace the file. On a full disk it is written into the room that it has already."""
    path = run_dir / FILE_NAME
    beside = path.with_suffix(".tmp")
    content = msgspec.json.encode(status)
    try:
        beside.write_bytes(
            content.ljust(-(-(len(content) + SPARE_BYTES) // PAGE_BYTES) * PAGE_BYTES)
        )
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
            _overwrite(path, content)


def read_status(run_dir: Path) -> LearnerStatus:
    """Raises RunFileError when no learner has ever written one there."""
    path = run_dir / FILE_NAME
    try:
        for _ in range(READ_ATTEMPTS):  # on a full disk a reader may see it half written
            with contextlib.suppress(msgspec.DecodeError):
                return msgspec.json.decode(path.read_bytes(), type=LearnerStatus)
            time.sleep(0.05)
        return msgspec.json.decode(path.read_bytes(), type=LearnerStatus)
    except FileNotFoundError as error:
        raise RunFileError(
            f"{run_dir} has no {FILE_NAME}: no learner has run there, or it is not a run directory."
        ) from error
    except msgspec.DecodeError as error:
        raise RunFileError(f"{path} cannot be read: {error}.") from error


def _overwrite(path: Path, content: bytes) -> None:
    size = path.stat().st_size
    if len(content) <= size:
        with path.open("r+b") as file:
            file.write(content.ljust(size))


def status_lines(status: LearnerStatus, now: float | None = None) -> list[str]:
    """For a person. Says first when the file is old, since then the learner is gone or stuck."""
    age_s = (time.time() if now is None else now) - status.written_at
    scheduler = status.scheduler
    lines = []
    if age_s > 5.0:
        lines.append(
            f"The learner (pid {status.pid}) has not reported for {age_s:.0f} s: it ended, or it "
            "hangs; send it SIGQUIT for its stacks, or resume the run."
        )
    lines.append(f"learner: {status.doing} for {status.doing_s:.1f} s, version {scheduler.version}")
    lines.append(
        f"episodes: {sum(scheduler.playing.values())} played, {scheduler.buffered} ready, "
        f"{scheduler.waiting} leases wait for an actor"
    )
    lines += [
        f"wait: {one.who} waits for {one.whom} for {one.since_s:.1f} s"
        for one in (*scheduler.waits, *status.waits)
    ]
    for actor in status.actors:
        state = "ready" if actor.ready else "engine starting"
        silent = f", silent for {actor.silent_s:.0f} s" if actor.silent_s > 3.0 else ""
        waits = f", waits for {actor.waiting_for}" if actor.waiting_for else ""
        lines.append(
            f"actor {actor.name}: {state}, weights of version {actor.weights_version}, plays "
            f"{actor.playing} of {actor.capacity}, connected {actor.connected_s:.0f} s"
            f"{silent}{waits}"
        )
    if not status.actors:
        lines.append("actors: none connected")
    if scheduler.last_error:
        lines.append(f"last error: {scheduler.last_error}")
    return [plain(line) for line in lines]
