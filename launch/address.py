"""Is this the address of a learner, and may it be spoken with in clear?"""

from pathlib import Path
from urllib.parse import urlsplit

from capo.protocol.errors import ConfigError
from capo.protocol.keys import ActorKeys, is_loopback, load_actor_keys


def check_address(address: str) -> None:
    """Raises ConfigError unless `address` is tcp://HOST:PORT."""
    try:
        parts = urlsplit(address)
        good = parts.scheme == "tcp" and bool(parts.hostname) and bool(parts.port)
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"{address!r} is not an address as a learner prints it, tcp://HOST:PORT.")


def keys_for(address: str, key_file: str, insecure: bool) -> ActorKeys | None:
    """The keys in `key_file`, or None where none are needed.

    Raises ConfigError if there are none for another machine and nobody said `insecure`.
    """
    if key_file:
        return load_actor_keys(Path(key_file))
    if not insecure and not is_loopback(address):
        raise ConfigError(
            f"{address} is another machine, and whoever answers there is believed: give the "
            "key file from capo keygen with --keys, or --insecure on a network you trust."
        )
    return None
