"""SIGQUIT prints where every thread and task of this process stands, and the process goes on."""

import asyncio
import faulthandler
import signal
import sys
from types import FrameType

_loops: list[asyncio.AbstractEventLoop] = []


def stacks_on_sigquit() -> None:
    """Threads at once, even when the interpreter is stuck in C code; for `kill -QUIT PID`. Tasks
    of loops that `tasks_of` knows follow once these get to run. Call it from the main thread."""
    signal.signal(signal.SIGQUIT, _ask_loops)
    faulthandler.register(signal.SIGQUIT, file=sys.stderr, all_threads=True, chain=True)


def tasks_of(loop: asyncio.AbstractEventLoop) -> None:
    """From now on this loop is asked too."""
    _loops.append(loop)


def _ask_loops(number: int, frame: FrameType | None) -> None:
    for loop in _loops:
        if not loop.is_closed():
            loop.call_soon_threadsafe(_print_tasks, loop)


def _print_tasks(loop: asyncio.AbstractEventLoop) -> None:
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        task.print_stack(limit=8, file=sys.stderr)
