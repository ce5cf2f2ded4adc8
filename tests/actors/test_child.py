"""A spawned child dies with a killed parent and survives the parent's Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = """
import multiprocessing, os, sys, time

def child(pipe):
    from capo.actors.child import end_with_parent
    end_with_parent()
    pipe.send(os.getpid())
    time.sleep(120)

if __name__ == "__main__":
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    context.Process(target=child, args=(there,), daemon=True).start()
    print(here.recv(), flush=True)
    time.sleep(120)
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_it_ends_with_a_killed_parent_but_not_of_ctrl_c(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(SCRIPT)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, signal.SIGINT)
        time.sleep(0.3)
        assert alive(child)
        parent.kill()
        deadline = time.monotonic() + 20
        while alive(child):
            assert time.monotonic() < deadline, "the child outlived its parent by 20 s"
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
