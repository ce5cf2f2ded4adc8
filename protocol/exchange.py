"""What the server does with every message, on its loop: introduce, order, ack, refuse, send.

Owns the socket and the sessions. Knows no thread but the writer, and not what records mean.
"""

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import zmq
from msgspec.structs import replace

from capo.protocol.commits import Deliveries, GroupCommit
from capo.protocol.errors import ProtocolError
from capo.protocol.frames import Frame, FrameDecoder, Limits, encode, size_of
from capo.protocol.handler import Handler, ServerStats
from capo.protocol.handshake import KeyHolders, unreadable_refusal, version_refusal
from capo.protocol.messages import (
    Ack,
    Delivery,
    Goodbye,
    Hello,
    LearnerHeartbeat,
    Refused,
    Reintroduce,
    StatusReport,
    StatusRequest,
    ToLearner,
)
from capo.protocol.sayings import Seldom, plain
from capo.protocol.sessions import MAX_OUTGOING, Session, Sessions, Verdict
from capo.protocol.sockets import OnFailure, Parts, Pump
from capo.protocol.validate import check_control, check_delivery, check_hello

logger = logging.getLogger(__name__)


class Exchange:
    """All actors of one ROUTER socket. `max_pending_bytes` bounds what waits for the writer.

    `keyed`: a ZapGate named every connection by its key, and ids belong to keys.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        handler: Handler,
        *,
        writer: ThreadPoolExecutor,
        stats: ServerStats,
        limits: Limits,
        max_pending_bytes: int,
        keyed: bool,
        on_failure: OnFailure,
    ) -> None:
        self.commits = GroupCommit(handler.commit, self._committed, writer)
        self._handler = handler
        self._stats = stats
        self._limits = limits
        self._max_pending_bytes = max_pending_bytes
        self._decoder: FrameDecoder[ToLearner] = FrameDecoder(ToLearner, limits)
        self._holders = KeyHolders() if keyed else None
        self._sessions = Sessions()
        self._closing = False
        self._warn = Seldom(logger.warning)
        self._blocked: set[Session] = set()  # have messages that their connection did not take
        self._pump = Pump(socket, limits, self._receive, self._flush_blocked, on_failure)

    def beat(self, now: float, stall_s: float, heartbeat: LearnerHeartbeat) -> None:
        """Send heartbeats that are due and find who is silent. Nobody listened for `stall_s`."""
        self._warn.due()
        frames = encode(heartbeat)
        for session in self._sessions:
            if session.gone:
                continue
            session.last_heard += stall_s
            if session.silent(now):
                self._lose(
                    session, f"nothing was heard from it for {now - session.last_heard:.0f} s"
                )
            elif session.identity is not None and now >= session.next_heartbeat:
                session.next_heartbeat = now + session.heartbeat_s
                self._send(session, frames)
        self._flush_blocked()

    def send(self, actor_id: str, frames: list[Frame]) -> None:
        session = self._sessions.of_actor(actor_id)
        if session is None or session.identity is None:
            self._stats.undeliverable += 1
        else:
            self._send(session, frames)

    async def drain(self, timeout_s: float) -> None:
        """Take no more deliveries; commit and ack what was taken, as far as that can be done."""
        self._closing = True
        await self.commits.drain(timeout_s)

    def close(self, linger_ms: int) -> None:
        self._pump.close(linger_ms)

    # -- incoming -------------------------------------------------------------------------------

    def _receive(self, parts: Parts) -> None:
        identity = parts[0]
        frames = parts[1:]
        session = self._session_of(identity)
        try:
            message = self._decoder.decode(frames)
            if isinstance(message, Hello):
                self._hello(identity, message)
            elif isinstance(message, StatusRequest):
                self._send_once(identity, encode(StatusReport(status=self._handler.report())))
            elif session is None:
                self._stranger(identity, message)
            else:
                session.last_heard = time.monotonic()
                if isinstance(message, Delivery):
                    self._delivery(session, message, size_of(frames))
                    return
                check_control(message)
                if isinstance(message, Goodbye):
                    self._lose(session, message.reason)
                else:
                    self._handler.control(session.actor_id, message)
        except ProtocolError as error:
            self._stats.malformed += 1
            self._refuse(identity, unreadable_refusal(frames[0] if frames else b"") or str(error))

    def _session_of(self, identity: bytes) -> Session | None:
        session = self._sessions.of_identity(identity)
        if session is None or self._holders is None or session.key == self._pump.user_id:
            return session
        # Peers may choose their routing ids: this one was another peer's, which is gone.
        self._sessions.disconnect(session)
        return None

    def _hello(self, identity: bytes, hello: Hello) -> None:
        refusal = version_refusal(hello.protocol_version)
        if refusal:
            self._refuse(identity, refusal)
            return
        check_hello(hello)
        known = self._sessions.of_identity(identity)
        if known is not None and known.actor_id != hello.actor_id:
            raise ProtocolError(f"this connection is {known.actor_id}'s, not {hello.actor_id}'s")
        key = ""
        if self._holders is not None:
            key = self._pump.user_id
            refusal = self._holders.refusal(hello.actor_id, key)
            if refusal:
                self._refuse(identity, refusal)
                return
        answer = self._handler.hello(hello)
        if isinstance(answer, Refused):
            session = self._sessions.of_actor(hello.actor_id)
            if session is not None and not session.gone:
                self._lose(session, f"refused: {answer.reason}")
            self._refuse(identity, answer.reason)
            return
        session = self._sessions.connect(hello.actor_id, identity, key, answer, time.monotonic())
        welcome = replace(answer, max_message_bytes=self._limits.max_message_bytes)
        self._send(session, encode(welcome))

    def _stranger(self, identity: bytes, message: ToLearner) -> None:
        self._stats.strangers += 1
        if not isinstance(message, Goodbye):
            self._send_once(identity, encode(Reintroduce()))

    def _delivery(self, session: Session, delivery: Delivery, num_bytes: int) -> None:
        if self._closing:
            return  # it is delivered again to the server after this one
        verdict = session.judge(delivery.sequence)
        if verdict is Verdict.NEXT:
            if self.commits.pending_bytes + num_bytes > self._max_pending_bytes:
                self._stats.over_memory += 1
                return
            check_delivery(delivery)
            session.accepted = delivery.sequence
            self.commits.add(session.actor_id, delivery, num_bytes)
            self._stats.deliveries += 1
            self._stats.records += len(delivery.steps) + len(delivery.ends)
            self._stats.bytes_accepted += num_bytes
        elif verdict is Verdict.COMMITTED:
            self._stats.duplicates += 1
            self._send(session, encode(Ack(sequence=session.committed)))
        elif verdict is Verdict.PENDING:
            self._stats.duplicates += 1
        elif verdict is Verdict.GAP:
            self._stats.gaps += 1
        else:
            self._stats.over_window += 1

    def _committed(self, deliveries: Deliveries) -> None:
        self._stats.commits += 1
        last = {actor_id: delivery.sequence for actor_id, delivery in deliveries}
        for actor_id, sequence in last.items():
            session = self._sessions.of_actor(actor_id)
            if session is None:
                continue  # lost, after a Hello that already found these in the run file
            session.committed = max(session.committed, sequence)
            if session.gone:
                self._sessions.forget(session)
            elif session.identity is not None:
                self._send(session, encode(Ack(sequence=session.committed)))

    def _refuse(self, identity: bytes, reason: str) -> None:
        """Tell the sender why. An actor that is refused ends, so its leases are free at once."""
        self._stats.refused += 1
        session = self._sessions.of_identity(identity)
        who = "a connection" if session is None else f"the actor {plain(session.actor_id)}"
        self._warn(f"refused {who}: {plain(reason)}")
        if session is not None:
            self._lose(session, f"refused: {reason}")
        self._send_once(identity, encode(Refused(reason=reason)))

    def _lose(self, session: Session, reason: str) -> None:
        self._sessions.disconnect(session)
        session.gone = True
        self._blocked.discard(session)
        self._sessions.forget(session)
        self._handler.lost(session.actor_id, reason)

    # -- outgoing -------------------------------------------------------------------------------

    def _send(self, session: Session, frames: list[Frame]) -> None:
        if len(session.outgoing) >= MAX_OUTGOING:
            self._lose(session, f"it does not read: {MAX_OUTGOING} messages wait for it")
            return
        session.outgoing.append(frames)
        self._flush(session)

    def _flush_blocked(self) -> None:
        for session in list(self._blocked):
            self._flush(session)

    def _flush(self, session: Session) -> None:
        while session.outgoing and session.identity is not None:
            try:
                sent = self._pump.send([session.identity, *session.outgoing[0]])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._stats.undeliverable += len(session.outgoing)
                self._sessions.disconnect(session)
                break
            if not sent:
                self._blocked.add(session)
                return
            session.outgoing.popleft()
        self._blocked.discard(session)

    def _send_once(self, identity: bytes, frames: list[Frame]) -> None:
        """To a connection without a session; it asks again if this does not arrive."""
        try:
            sent = self._pump.send([identity, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            sent = False
        self._stats.undeliverable += not sent
