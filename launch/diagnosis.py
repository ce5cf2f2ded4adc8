"""SIGQUIT prints where every thread and task of this process stands, and the process goes on."""

import asyncio
import faulthandler
import signal
import sys
from types import FrameType


def stacks_on_sigquit() -> None:
    """Threads at once, even when the interpreter is stuck in C code; for `kill -QUIT PID`."""
    faulthandler.register(signal.SIGQUIT, file=sys.stderr, all_threads=True, chain=False)


def tasks_on_sigquit(loop: asyncio.AbstractEventLoop) -> None:
    """Also the tasks of this loop, once it gets to run. Call it from the main thread."""

    def show(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        loop.call_soon_threadsafe(_print_tasks, loop)

    signal.signal(signal.SIGQUIT, show)


def _print_tasks(loop: asyncio.AbstractEventLoop) -> None:
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        task.print_stack(limit=8, file=sys.stderr)
