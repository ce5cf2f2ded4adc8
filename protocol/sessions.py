"""What the server remembers of one actor. Pure state: knows no socket, no clock and no thread.

`committed <= accepted <= committed + window`: deliveries up to `committed` are durable and acked,
those up to `accepted` wait for the writer.
"""

from collections import deque
from enum import Enum, auto

from capo.protocol.frames import Frame
from capo.protocol.messages import Welcome

MAX_OUTGOING = 1024  # messages that wait for one actor that does not read


class Verdict(Enum):
    """What to do with a delivery, by its sequence number."""

    NEXT = auto()  # take it
    COMMITTED = auto()  # durable already: ack again, drop
    PENDING = auto()  # taken already: drop, the ack will come
    GAP = auto()  # one before it is missing: drop, the actor resends from there
    FULL = auto()  # more than the window allows: drop, the actor resends


class Session:
    """One actor, over all its connections. `identity` is None while it has no connection."""

    def __init__(
        self, actor_id: str, identity: bytes, key: str, welcome: Welcome, now: float
    ) -> None:
        self.actor_id = actor_id
        self.committed = 0
        self.accepted = 0
        self.outgoing: deque[list[Frame]] = deque()
        self.connect(identity, key, welcome, now)

    def connect(self, identity: bytes, key: str, welcome: Welcome, now: float) -> None:
        """A new connection. What was not sent on an earlier one is dropped: Hello said it again.

        `key` is its public key, "" where there are no keys. After a restart of the server the run
        file knows more than we do, hence the maximum.
        """
        if welcome.window < 1:
            raise ValueError(f"a Welcome with a window of {welcome.window} deliveries")
        self.identity: bytes | None = identity
        self.key = key
        self.gone = False  # reported as lost; kept only while deliveries of it wait for the writer
        self.outgoing.clear()
        self.window = welcome.window
        self.heartbeat_s = welcome.heartbeat_s
        self.dead_after_s = welcome.dead_after_s
        self.last_heard = now
        self.next_heartbeat = now + welcome.heartbeat_s
        self.committed = max(self.committed, welcome.last_sequence)
        self.accepted = max(self.accepted, self.committed)

    def disconnect(self) -> None:
        """The connection is gone; the actor may come back on another one."""
        self.identity = None
        self.outgoing.clear()

    def judge(self, sequence: int) -> Verdict:
        if sequence <= self.committed:
            return Verdict.COMMITTED
        if sequence <= self.accepted:
            return Verdict.PENDING
        if sequence > self.accepted + 1:
            return Verdict.GAP
        return Verdict.NEXT if self.accepted - self.committed < self.window else Verdict.FULL

    def silent(self, now: float) -> bool:
        return now - self.last_heard > self.dead_after_s
