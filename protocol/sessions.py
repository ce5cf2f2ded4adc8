"""What the server remembers of its actors. Pure state: knows no socket, no clock and no thread.

`committed <= accepted <= committed + window`: deliveries up to `committed` are durable and acked,
those up to `accepted` wait for the writer.
"""

from collections import deque
from collections.abc import Iterator
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


class Sessions:
    """All actors of a server, by their ids and by the connections that they have now.

    Iterates over a copy, so that actors may be lost meanwhile.
    """

    def __init__(self) -> None:
        self._of_actor: dict[str, Session] = {}
        self._of_identity: dict[bytes, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._of_actor.values()))

    def of_actor(self, actor_id: str) -> Session | None:
        return self._of_actor.get(actor_id)

    def of_identity(self, identity: bytes) -> Session | None:
        return self._of_identity.get(identity)

    def connect(
        self, actor_id: str, identity: bytes, key: str, welcome: Welcome, now: float
    ) -> Session:
        """The session of an actor that is welcome on this connection, in place of any other one."""
        session = self._of_actor.get(actor_id)
        if session is None:
            session = self._of_actor[actor_id] = Session(actor_id, identity, key, welcome, now)
        else:
            self.disconnect(session)
            session.connect(identity, key, welcome, now)
        self._of_identity[identity] = session
        return session

    def disconnect(self, session: Session) -> None:
        """Its connection is gone; the actor may come back on another one."""
        if session.identity is not None:
            del self._of_identity[session.identity]
        session.disconnect()

    def forget(self, session: Session) -> None:
        """Forget a lost actor, unless the writer still has deliveries of it."""
        if session.committed == session.accepted:
            self._of_actor.pop(session.actor_id, None)
