"""What the server asks of the learner, and what it counts."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from capo.protocol.messages import Delivery, Hello, Refused, ToLearner, Welcome


class Handler(Protocol):
    """The learner behind a server.

    All but `commit` run on the server's loop and have to be quick. What they raise ends the server,
    except StorageFullError of `commit`, and ProtocolError of `hello` or `control`, which refuses
    the sender.
    """

    def hello(self, hello: Hello) -> Welcome | Refused:
        """A connection of a new or known actor. What was sent to it before may not have arrived.

        `held_leases` says what it plays: grants that are not among them have to be made again.
        """
        ...

    def commit(self, deliveries: Sequence[tuple[str, Delivery]]) -> None:
        """Make these durable, in one transaction; in the writer thread. Afterwards they are acked.

        StorageFullError = keep them and try again. Deliveries of an actor that is already lost may
        still come.
        """
        ...

    def control(self, actor_id: str, message: ToLearner) -> None:
        """Anything but Hello, Delivery, StatusRequest and Goodbye."""
        ...

    def report(self) -> bytes:
        """The answer to a StatusRequest, which may come from anyone who may connect."""
        ...

    def lost(self, actor_id: str, reason: str) -> None:
        """The actor is gone: it left, fell silent, or broke the contract. It may come back."""
        ...

    def tick(self) -> None:
        """Ten times a second."""
        ...


class ServerStats(Struct):
    """Counters since the start, written by the server's loop alone."""

    deliveries: int = 0
    records: int = 0
    bytes_accepted: int = 0
    commits: int = 0
    duplicates: int = 0
    gaps: int = 0
    over_window: int = 0
    over_memory: int = 0
    malformed: int = 0
    refused: int = 0
    strangers: int = 0  # messages of connections that had not said Hello
    undeliverable: int = 0  # messages to actors that were not there
