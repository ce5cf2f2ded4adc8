"""CURVE keys: the files that `capo keygen` writes, and the addresses that must have keys.

The learner's file holds its own pair and the public keys of the actors it lets in; an actor's file
holds its own pair and the learner's public key. Both are TOML, readable by their owner only.
"""

import os
import stat
import struct
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.utils.z85
from msgspec import Struct

from capo.protocol.errors import ConfigError

K = TypeVar("K", "LearnerKeys", "ActorKeys")

LEARNER_FILE = "learner.key"
ACTOR_SUFFIX = ".key"


class LearnerKeys(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="learner"
):
    """`actors` are the public keys of those that may connect."""

    public: str
    secret: str
    actors: tuple[str, ...]

    def apply(self, socket: "zmq.Socket[bytes]") -> None:
        socket.curve_server = True
        socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()
        socket.zap_domain = b"capo"

    def __repr__(self) -> str:
        return f"LearnerKeys(public={self.public!r}, {len(self.actors)} actors)"


class ActorKeys(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="actor"
):
    """`learner` is the public key of the learner this actor trusts."""

    public: str
    secret: str
    learner: str

    def apply(self, socket: "zmq.Socket[bytes]") -> None:
        socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()
        socket.curve_serverkey = self.learner.encode()

    def __repr__(self) -> str:
        return f"ActorKeys(public={self.public!r})"


def generate(folder: Path, actors: Sequence[str] = ("actor",)) -> list[Path]:
    """Write `learner.key` and one file for each actor's name into `folder`; return their paths.

    Raises ConfigError if one is there already: a key that is in use is never overwritten.
    """
    for name in actors:
        _check_name(name)
    if not actors or len(set(actors)) < len(actors):
        raise ConfigError(f"actors need different names, at least one: {', '.join(actors)}")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    public, secret = _new_pair()
    pairs = {name: _new_pair() for name in actors}
    files = {
        folder / LEARNER_FILE: _learner_text(public, secret, [pair[0] for pair in pairs.values()])
    }
    for name, (actor_public, actor_secret) in pairs.items():
        files[folder / f"{name}{ACTOR_SUFFIX}"] = _actor_text(actor_public, actor_secret, public)
    for path in files:
        if path.exists():
            raise ConfigError(f"{path} exists; choose another folder, or remove it first")
    for path, text in files.items():
        _write_private(path, text)
    return list(files)


def add_actor(folder: Path, name: str) -> Path:
    """Write a key file for one more actor, which the learner accepts from its next start on.

    Returns its path; raises ConfigError if there is one already, or no learner's file.
    """
    _check_name(name)
    learner_path = folder / LEARNER_FILE
    learner = load_learner_keys(learner_path)
    path = folder / f"{name}{ACTOR_SUFFIX}"
    if path.exists():
        raise ConfigError(f"{path} exists; choose another name, or remove it first")
    public, secret = _new_pair()
    _write_private(path, _actor_text(public, secret, learner.public))
    staged = learner_path.with_suffix(".new")
    staged.unlink(missing_ok=True)
    _write_private(staged, _learner_text(learner.public, learner.secret, [*learner.actors, public]))
    staged.replace(learner_path)
    return path


def load_learner_keys(path: Path) -> LearnerKeys:
    """Read a learner's key file; raises ConfigError that says what is wrong with it."""
    keys = _load(path, LearnerKeys)
    _check_keys(path, [keys.public, keys.secret, *keys.actors])
    _check_pair(path, keys.public, keys.secret)
    return keys


def load_actor_keys(path: Path) -> ActorKeys:
    """Read an actor's key file; raises ConfigError that says what is wrong with it."""
    keys = _load(path, ActorKeys)
    _check_keys(path, [keys.public, keys.secret, keys.learner])
    _check_pair(path, keys.public, keys.secret)
    return keys


def check_bind(address: str, keys: LearnerKeys | None, insecure: bool) -> None:
    """Raise ConfigError if `address` is open to other machines and nothing guards it."""
    if keys is None and not insecure and not is_loopback(address):
        raise ConfigError(
            f"{address} can be reached from other machines, but there are no keys: make some with "
            "`capo keygen` and set network.key_file, or set network.insecure = true on a network "
            "where everyone may be trusted"
        )


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine can reach `address`."""
    scheme, _, place = address.partition("://")
    if scheme in ("ipc", "inproc"):
        return True
    host = place.rpartition(":")[0].strip("[]")
    if host in ("localhost", "lo", "::1"):
        return True
    numbers = host.split(".")
    return len(numbers) == 4 and numbers[0] == "127" and all(part.isdigit() for part in numbers)


def _check_name(name: str) -> None:
    if not name or name == "learner" or any(not (c.isalnum() or c in "-_") for c in name):
        raise ConfigError(
            f"{name!r} cannot name an actor: names are letters, digits, - and _, and not 'learner'"
        )


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _learner_text(public: str, secret: str, actors: Sequence[str]) -> str:
    lines = "".join(f'    "{key}",\n' for key in actors)
    return (
        "# Keep this file on the learner's machine. Delete an actor's line to shut it out.\n"
        f'role = "learner"\npublic = "{public}"\nsecret = "{secret}"\nactors = [\n{lines}]\n'
    )


def _actor_text(public: str, secret: str, learner: str) -> str:
    return (
        "# Give this file to one actor, over a safe channel.\n"
        f'role = "actor"\npublic = "{public}"\nsecret = "{secret}"\nlearner = "{learner}"\n'
    )


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _load(path: Path, kind: type[K]) -> K:
    try:
        mode = path.stat().st_mode
        content: Any = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a key file of `capo keygen`: {error}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"{path} can be read by others; run: chmod 600 {path}")
    role = kind.__struct_config__.tag
    if content.get("role") != role:
        raise ConfigError(
            f"{path} is not a key file for the role {role!r}: its role is {content.get('role')!r}"
        )
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} is not a valid key file: {error}") from None


def _check_keys(path: Path, keys: Iterable[str]) -> None:
    for key in keys:
        try:
            valid = len(key) == 40 and len(zmq.utils.z85.decode(key)) == 32
        except (ValueError, KeyError, struct.error):
            valid = False
        if not valid:
            raise ConfigError(f"{path} holds a key that is not 40 characters of Z85")


def _check_pair(path: Path, public: str, secret: str) -> None:
    if zmq.curve_public(secret.encode()).decode() != public:
        raise ConfigError(f"in {path} the secret key does not belong to the public key")
