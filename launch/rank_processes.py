"""The other ranks of a learner, as child processes of rank 0, unless a launcher started them all.

`learner.ranks` says how many there are. Under torchrun, srun or DeepSpeed's launcher every rank is
a `capo learner`; otherwise rank 0 starts the others here, on its own machine.
"""

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from capo.launch.processes import Child
from capo.launch.rank import LEADER_PID, launched
from capo.learner.orders import End, Orders
from capo.learner.ranks import LOOPBACK_ONLY, RENDEZVOUS, join, leave, loopback_interface
from capo.protocol.errors import ConfigError, RankLostError

_CHECK_S = 0.2
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_END_S = 5.0
_PATIENCE_S = 5.0  # of somebody who asked twice for the end


class Crew:
    """All ranks of this learner, seen from rank 0."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.orders: Orders | None = None
        self.ending = threading.Event()  # from now on ranks may end

    def lead(self) -> Orders | None:
        """Waits until all ranks are there, up to 10 minutes; None if rank 0 is the only one."""
        if self.num_ranks > 1 and self.orders is None:
            self.orders = Orders(join())
        return self.orders

    def dismiss(self) -> None:
        self.ending.set()
        if self.orders is not None:
            with contextlib.suppress(RankLostError):
                self.orders.give(End())
            leave()


@contextlib.contextmanager
def all_ranks(num_ranks: int, log_dir: Path | None, lost: Callable[[str], None]) -> Iterator[Crew]:
    """On rank 0: the other ranks are there while it lasts, and end with it.

    `lost` is called in a thread, with a sentence, as soon as one that was started here ends before
    that; it should end this process. Raises ConfigError where a launcher started another number of
    ranks, or this machine has too few GPUs.
    """
    crew = Crew(num_ranks)
    if place := launched():
        _require_same_number(place[1], num_ranks)
        yield crew
        crew.dismiss()
        return
    if num_ranks == 1:
        yield crew
        return
    _require_devices(num_ranks)
    with _started(crew, log_dir, lost) as children:
        yield crew
        if found := _ended(children):  # what went wrong may be this
            lost(found)
        crew.dismiss()
        if crew.orders is not None:
            _await_end(children)


@contextlib.contextmanager
def _started(
    crew: Crew, log_dir: Path | None, lost: Callable[[str], None]
) -> Iterator[Sequence[Child]]:
    with (
        tempfile.TemporaryDirectory(prefix="capo-ranks-") as meeting,
        _signals_told() as signals,
    ):
        common = _environment(crew.num_ranks, Path(meeting))
        own = {**common, "RANK": "0", "LOCAL_RANK": "0"}
        os.environ.update(own)
        children: list[Child] = []

        def part(sentence: str) -> None:
            shutil.rmtree(meeting, ignore_errors=True)
            lost(sentence)

        watch = threading.Thread(
            target=_watch, args=(children, crew.ending, signals, part), name="ranks", daemon=True
        )
        try:
            for rank in range(1, crew.num_ranks):
                log = log_dir / f"rank-{rank}.log" if log_dir else None
                place = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                children.append(Child(f"rank {rank}", ["rank"], log, place))
            watch.start()
            yield children
        except (RuntimeError, RankLostError):  # as when one is lost in the middle of an exchange
            watch.join(timeout=5 * _CHECK_S)  # it knows better what happened
            raise
        finally:
            crew.ending.set()
            for child in children:
                child.kill_session()
            for name in own:
                del os.environ[name]


def _environment(num_ranks: int, meeting: Path) -> dict[str, str]:
    """They meet in a file and talk over loopback, so no other machine can reach them."""
    common = {
        "WORLD_SIZE": str(num_ranks),
        RENDEZVOUS: str(meeting / "store"),
        LEADER_PID: str(os.getpid()),
    }
    loopback = loopback_interface()
    if loopback is not None and LOOPBACK_ONLY not in os.environ:
        common[LOOPBACK_ONLY] = loopback
    return common


@contextlib.contextmanager
def _signals_told() -> Iterator[socket.socket]:
    """Where the number of every signal arrives, also while the main thread is inside an exchange
    with a rank that does not answer and so cannot handle it."""
    told, teller = socket.socketpair()
    with told, teller:
        told.setblocking(False)
        teller.setblocking(False)
        before = signal.set_wakeup_fd(teller.fileno(), warn_on_full_buffer=False)
        try:
            yield told
        finally:
            signal.set_wakeup_fd(before)


def _watch(
    children: Sequence[Child],
    ending: threading.Event,
    signals: socket.socket,
    lost: Callable[[str], None],
) -> None:
    asked = 0
    deadline = float("inf")
    while not ending.wait(_CHECK_S):
        if (found := _ended(children)) and not ending.is_set():
            lost(found)
            return
        with contextlib.suppress(BlockingIOError):
            numbers = signals.recv(64)
            asked += sum(number in _STOP for number in numbers)
        if asked > 1:
            deadline = min(deadline, time.monotonic() + _PATIENCE_S)
        if time.monotonic() > deadline:
            for child in children:
                child.kill_session()
            lost("The ranks of this learner do not answer.")
            return


def _ended(children: Sequence[Child]) -> str:
    """A sentence about the first that has ended, "" if none has."""
    for child in children:
        if (code := child.exit_code()) is not None:
            words = child.last_words()
            said = f" It said last:\n{words}" if words else ""
            return f"{child.name} (pid {child.pid}) ended with exit code {code}.{said}"
    return ""


def _await_end(children: Sequence[Child]) -> None:
    deadline = time.monotonic() + _END_S
    for child in children:
        child.wait(max(0.0, deadline - time.monotonic()))


def _require_same_number(started: int, num_ranks: int) -> None:
    if started != num_ranks:
        raise ConfigError(
            f"the launcher started {started} rank(s), but learner.ranks is {num_ranks}; make them "
            "the same."
        )


def _require_devices(num_ranks: int) -> None:
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else num_ranks
    if devices < num_ranks:
        raise ConfigError(
            f"learner.ranks is {num_ranks}, but this machine has {devices} GPU(s); each rank needs "
            "one of its own."
        )
