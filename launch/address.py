"""Where a learner is, how that is found out, and whether the talk with it may be unencrypted."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from capo.launch.run_directory import read_address
from capo.protocol.errors import ConfigError, PeerLostError
from capo.protocol.keys import ActorKeys, is_loopback, load_actor_keys

POLL_S = 0.5
REMIND_S = 30.0


def check_address(address: str) -> None:
    """Raises ConfigError unless `address` is tcp://HOST:PORT."""
    try:
        parts = urlsplit(address)
        good = parts.scheme == "tcp" and bool(parts.hostname) and bool(parts.port)
    except ValueError:
        good = False
    if not good:
        raise ConfigError(
            f"{address!r} is neither an address as a learner prints it, tcp://HOST:PORT, nor the "
            "folder of a run."
        )


def is_run_folder(place: str) -> bool:
    """Whether a person who wrote `place` means a folder, which need not be there yet."""
    return Path(place).is_dir() or ("/" in place and ":" not in place)


def keys_for(address: str, key_file: str, insecure: bool) -> ActorKeys | None:
    """The keys in `key_file`, or None where none are needed.

    Raises ConfigError if there are none for another machine and nobody said `insecure`.
    """
    if key_file:
        return load_actor_keys(Path(key_file))
    require_keys(address, insecure)
    return None


def require_keys(address: str, guarded: bool) -> None:
    """Raises ConfigError for another machine, unless there are keys or none are wanted."""
    if not guarded and not is_loopback(address):
        raise ConfigError(
            f"{address} is another machine, and whoever answers there is believed: give the "
            "key file from capo keygen with --keys, or --insecure on a network you trust."
        )


class FollowsRun:
    """Where the learner of a run is, by what it left in the run's folder, whenever it is asked.

    One that is resumed on another machine leaves its new address there, so that actors find it.
    """

    def __init__(self, run_dir: Path, address: str, *, guarded: bool) -> None:
        """`guarded`: there are keys, or none are wanted."""
        self._run_dir = run_dir
        self._address = address
        self._guarded = guarded

    def __call__(self) -> str:
        """Raises ConfigError where it has moved to another machine and there are no keys."""
        found = read_address(self._run_dir)
        if found is not None and found != self._address:
            check_address(found)
            require_keys(found, self._guarded)
            self._address = found
        return self._address


def await_address(run_dir: Path, timeout_s: float, say: Callable[[str], None]) -> str:
    """The address that a learner leaves in its run's folder, as soon as it is there.

    Raises PeerLostError when there is none in `timeout_s`.
    """
    began = said = time.monotonic()
    while (address := read_address(run_dir)) is None:
        now = time.monotonic()
        if now - began > timeout_s:
            raise PeerLostError(f"no learner left its address in {run_dir} within {timeout_s:g} s")
        if said == began or now - said > REMIND_S:
            said = now
            say(f"waiting for a learner to leave its address in {run_dir}")
        time.sleep(POLL_S)
    return address


def reachable(bound: str) -> str:
    """The address for others: one that is bound to all interfaces is known by this machine's."""
    scheme, _, place = bound.partition("://")
    host, _, port = place.rpartition(":")
    if host not in ("0.0.0.0", "[::]", "*"):
        return bound
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address of nobody: UDP sends nothing yet
            return f"{scheme}://{probe.getsockname()[0]}:{port}"
        except OSError:  # no network: only this machine can come
            return f"{scheme}://127.0.0.1:{port}"
