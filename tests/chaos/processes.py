"""Real processes to be killed: forked ones that start at once, and spawned ones.

Forked are a learner, which is `capo learner ...` itself, and an actor that is `scripted_actor`,
from one that has everything imported already: only the seconds that imports take are saved.
"""

import contextlib
import fcntl
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def _context() -> ForkServerContext:
    os.environ.update(
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        TRANSFORMERS_VERBOSITY="error",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        DS_ACCELERATOR="cpu",
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos.preload"])
    return context


def capo(arguments: list[str]) -> int:
    from capo.launch.main import main

    return main(arguments)


class Logged:
    """A process whose output is in `log`; subclasses say its `pid` and `exit_code`."""

    log: Path
    pid: int
    exit_code: int | None

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self, characters: int = 3000) -> str:
        return self.text()[-characters:]

    def wait_for(self, sentence: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while sentence not in self.text():
            assert self.exit_code is None or sentence in self.text(), f"ended:\n{self.tail()}"
            assert time.monotonic() < deadline, f"no {sentence!r} in:\n{self.tail()}"
            time.sleep(0.05)


class Forked(Logged):
    """One process running `target(*arguments)`, whose result is its exit code."""

    def __init__(self, log: Path, target, *arguments, **keywords) -> None:
        self.log = log
        self._process = _context().Process(
            target=_enter, args=(str(log), target, arguments, keywords), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        if self.exit_code is None:
            self.signal(signal.SIGKILL)
        self._process.join()

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        assert self.exit_code is not None, f"still runs after {timeout_s} s:\n{self.tail()}"
        return self.exit_code


class Program(Logged):
    """Any command, in a session of its own. Its output is in `log`, or on `terminal`, which it then
    belongs to."""

    def __init__(
        self,
        log: Path,
        command: Sequence[str],
        environment: Mapping[str, str],
        terminal: int | None = None,
    ) -> None:
        """`environment` is added to ours."""
        self.log = log
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=terminal,
                stdout=output if terminal is None else terminal,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if terminal is None else _own_terminal,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        return self._popen.poll()

    def kill(self) -> None:
        """With all that it started, as at the end of a machine; `signal` goes to itself alone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()

    def wait(self, timeout_s: float) -> int:
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout_s} s:\n{self.tail()}") from None

    def descendants(self) -> set[int]:
        """All processes that this one started, and theirs."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            parents[int(stat.parent.name)] = int(fields[1])
        found: set[int] = set()
        while (
            more := {child for child, parent in parents.items() if parent in found | {self.pid}}
            - found
        ):
            found |= more
        return found


def _own_terminal() -> None:
    """Its end shall be told to us, as a shell's is to the shell."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Spawned(Program):
    """`capo ...` as anybody starts it, for what cannot be forked."""

    def __init__(self, log: Path, *arguments: str, terminal: int | None = None) -> None:
        command = [sys.executable, "-m", "capo.launch.main", *arguments]
        super().__init__(log, command, {}, terminal)


def _enter(log: str, target, arguments, keywords) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.exit(target(*arguments, **keywords))
