"""Child processes of a command: start, watch, restart, stop."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from capo.protocol.sayings import plain

STOP_GRACE_S = 20.0


class Child:
    """One `capo` subprocess in a session of its own, so that a Ctrl-C reaches only its parent.

    `log` gets its output; None leaves it on this terminal.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path | None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` is added to ours."""
        self.name = name
        self.log = log
        self._arguments = arguments
        self._environment = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "capo.launch.main", *self._arguments]
        if self.log is None:
            return subprocess.Popen(command, env=self._environment, start_new_session=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            return subprocess.Popen(
                command,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()

    def restart(self) -> None:
        self._process = self._start()

    def signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill_session(self) -> None:
        """End the child and whatever it started (an engine's own processes)."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()

    def last_words(self, lines: int = 5) -> str:
        if self.log is None or not self.log.exists():
            return ""
        text = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "\n".join(f"    {plain(line)}" for line in text[-lines:])


def stop(children: Sequence[Child], grace_s: float = STOP_GRACE_S) -> None:
    """SIGTERM to all, then after `grace_s` the end of their sessions. Always returns."""
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for child in children:
        child.wait(max(0.0, deadline - time.monotonic()))
        child.kill_session()


def free_port() -> int:
    """A loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
