"""Real processes that start at once: forked from one that has everything imported already.

A learner is `capo learner ...` itself, an actor is `scripted_actor`. Both can be killed like any
other process; only the seconds that imports take are saved.
"""

import functools
import multiprocessing
import os
import signal
import sys
import time
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


class Forked:
    """One process running `target(*arguments)`, whose result is its exit code; output in `log`."""

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

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.exit_code is None:
            self.signal(signal.SIGKILL)
        self._process.join()

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        assert self.exit_code is not None, f"still runs after {timeout_s} s:\n{self.tail()}"
        return self.exit_code

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


def _enter(log: str, target, arguments, keywords) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.exit(target(*arguments, **keywords))
