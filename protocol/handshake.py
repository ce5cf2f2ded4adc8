"""Who may speak with whom: the protocol's version, whose an actor id is, and what to say if not."""

import msgspec
from msgspec import Struct

from capo.protocol.messages import PROTOCOL_VERSION

MAX_IDS_PER_KEY = 4096  # an actor takes a new id whenever it starts


class KeyHolders:
    """Which public key an actor id belongs to: the one that introduced it first.

    Remembers the latest ids of every key, so those that one key makes up push out its own alone.
    """

    def __init__(self, max_ids_per_key: int = MAX_IDS_PER_KEY) -> None:
        self._max_ids = max_ids_per_key
        self._key_of: dict[str, str] = {}
        self._ids_of: dict[str, dict[str, None]] = {}  # oldest first

    def refusal(self, actor_id: str, key: str) -> str:
        """Why `key` may not introduce itself as `actor_id`, "" if it may."""
        if self._key_of.setdefault(actor_id, key) != key:
            return (
                f"the actor id {actor_id} belongs to the key that introduced it first, and this is "
                "another one; restart this actor, and it takes a new id"
            )
        ids = self._ids_of.setdefault(key, {})
        ids.pop(actor_id, None)
        ids[actor_id] = None
        if len(ids) > self._max_ids:
            oldest = next(iter(ids))
            del ids[oldest], self._key_of[oldest]
        return ""


class _AnyHello(Struct, tag="Hello"):
    """The one field of Hello that every version of the protocol has."""

    protocol_version: int


def version_refusal(version: int) -> str:
    """Why an actor of this protocol version is refused, "" if it is not."""
    if version == PROTOCOL_VERSION:
        return ""
    side = "actor" if version < PROTOCOL_VERSION else "learner"
    return (
        f"the actor speaks protocol version {version}, the learner {PROTOCOL_VERSION}; "
        f"upgrade capo-rl on the {side}'s machine"
    )


def unreadable_refusal(header: bytes) -> str:
    """The same for the header of a message that cannot be read, "" if its version is not why."""
    try:
        return version_refusal(msgspec.msgpack.decode(header, type=_AnyHello).protocol_version)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return ""
