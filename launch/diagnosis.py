"""SIGQUIT prints where every thread and task of this process stands, and the process goes on."""

import asyncio
import contextlib
import io
import signal
import sys
import threading
import traceback
from collections.abc import Callable

_LISTENER = "sigquit"
_FRAMES_OF_A_TASK = 8
_loops: list[asyncio.AbstractEventLoop] = []  # of the process, as its signal handlers are


def stacks_on_sigquit() -> None:
    """Print all stacks to stderr at every `kill -QUIT PID`. Call it from the main thread, early."""
    on_sigquit(print_stacks)


def on_sigquit(answer: Callable[[], None]) -> None:
    """Call `answer` at every SIGQUIT, in a thread of its own: it needs only the interpreter's
    lock, so a main thread that is stuck in a system call or in C code does not hold it up.

    Not `faulthandler.register`: that one reads the frames of threads that go on running, and a
    busy process dies of it. SIGQUIT stays blocked in processes that this one starts, so it waits
    there for a listener, and one from the terminal does not end a child that has none.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGQUIT})
    # For one that reaches a thread older than the mask, whose default would end the process.
    signal.signal(signal.SIGQUIT, lambda _number, _frame: answer())
    threading.Thread(target=_listen, args=(answer,), name=_LISTENER, daemon=True).start()


def tasks_of(loop: asyncio.AbstractEventLoop) -> None:
    """From now on the tasks of this loop are printed too."""
    _loops.append(loop)


def print_stacks() -> None:
    """To stderr in one piece: every thread of Python, then every task of the loops known here."""
    text = io.StringIO()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, f"unknown to Python ({ident:#x})")
        if name != _LISTENER:
            text.write(f"Stack of thread {name} (most recent call last):\n")
            text.writelines(traceback.format_stack(frame))
    for loop in _loops:
        if not loop.is_closed():
            for task in sorted(asyncio.all_tasks(loop), key=asyncio.Task.get_name):
                task.print_stack(limit=_FRAMES_OF_A_TASK, file=text)
    text.write("End of the stacks.\n")
    with contextlib.suppress(OSError):  # its reader may be gone
        print(text.getvalue(), end="", file=sys.stderr, flush=True)


def _listen(answer: Callable[[], None]) -> None:
    while True:
        signal.sigwait({signal.SIGQUIT})
        answer()
