"""Who may speak with whom: the protocol's version, and what to say when it differs."""

import msgspec
from msgspec import Struct

from capo.protocol.messages import PROTOCOL_VERSION


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
    """The same for the header of a message that could not be read, "" if it is no such Hello."""
    try:
        return version_refusal(msgspec.msgpack.decode(header, type=_AnyHello).protocol_version)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return ""
