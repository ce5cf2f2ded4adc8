"""What a process that vLLM spawns owes its actor: to end with it, and not to end before it."""

import multiprocessing
import os
import signal
import threading
import time

CHECK_S = 0.5


def end_with_parent() -> None:
    """In a spawned child: exit within a second of the parent's death, and ignore Ctrl-C.

    A terminal sends Ctrl-C to the whole process group, but it asks the actor to drain, for which it
    still needs its engine. In a process that was not spawned by multiprocessing nothing is done.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent.pid:
            time.sleep(CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
