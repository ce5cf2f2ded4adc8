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

    def __init__(self, actor_id: str, last_sequence: int) -> None:
        self.actor_id = actor_id
        self.identity: bytes | None = None
        self.key = ""  # the public key of its connection, where there are keys
        self.committed = last_sequence
        self.accepted = last_sequence
        self.window = 1
        self.heartbeat_s = 1.0
        self.dead_after_s = 15.0
        self.last_heard = 0.0
        self.next_heartbeat = 0.0
        self.outgoing: deque[list[Frame]] = deque()
        self.gone = False  # reported as lost; kept only while deliveries of it wait for the writer

    def connect(self, identity: bytes, welcome: Welcome, now: float) -> None:
        """A new connection. What was not sent on an earlier one is dropped: Hello said it again.

        After a restart of the server the run file knows more than we do, hence the maximum.
        """
        if welcome.window < 1:
            raise ValueError(f"a Welcome with a window of {welcome.window} deliveries")
        self.identity = identity
        self.gone = False
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
