"""The learner's end of the wire: one ROUTER socket on a thread and an event loop of its own.

It introduces actors, checks and orders what they deliver, has it committed and only then acks it,
keeps the pulse in both directions and says who is gone. What deliveries and leases mean is the
Handler's. Every callback of the Handler runs on the server's loop and must be quick, but for
`commit`, which runs in the writer thread.

An exception of the Handler (other than StorageFullError from `commit`) ends the server: it is in
`failure`, goes to `on_failure`, and is raised again by `close`.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec
import uvloop
import zmq
from msgspec import Struct

from capo.protocol.commits import Deliveries, GroupCommit
from capo.protocol.errors import CapoError, PeerLostError, ProtocolError
from capo.protocol.frames import MIB, Frame, FrameDecoder, Limits, encode, size_of
from capo.protocol.keys import LearnerKeys, ZapGate, check_bind
from capo.protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    Delivery,
    Goodbye,
    Hello,
    LearnerHeartbeat,
    Refused,
    Reintroduce,
    ToActor,
    ToLearner,
    Welcome,
)
from capo.protocol.sessions import MAX_OUTGOING, Session, Verdict
from capo.protocol.sockets import Parts, Pump
from capo.protocol.validate import check_delivery, check_hello

TICK_S = 0.1
STALL_S = 1.0  # a tick that comes this late was our own doing, not the actors' silence
START_TIMEOUT_S = 10.0
LINGER_MS = 500

logger = logging.getLogger(__name__)


class Handler(Protocol):
    """What the learner does with what comes in."""

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
        """Anything but Hello, Delivery and Goodbye."""
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


class Server:
    """`limits` bound one message, `max_pending_bytes` all that wait for the writer."""

    def __init__(
        self,
        address: str,
        handler: Handler,
        *,
        keys: LearnerKeys | None = None,
        insecure: bool = False,
        limits: Limits | None = None,
        max_pending_bytes: int = 512 * MIB,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        check_bind(address, keys, insecure)
        self.stats = ServerStats()
        self.failure: BaseException | None = None
        self._address = address
        self._handler = handler
        self._keys = keys
        self._limits = limits or Limits()
        self._max_pending_bytes = max_pending_bytes
        self._on_failure = on_failure
        self._decoder: FrameDecoder[ToLearner] = FrameDecoder(ToLearner, self._limits)
        self._sessions: dict[str, Session] = {}
        self._by_identity: dict[bytes, Session] = {}
        self._blocked: set[Session] = set()
        self._heartbeat = LearnerHeartbeat()
        self._started = threading.Event()
        self._bound = ""
        self._thread = threading.Thread(target=self._run, name="capo-server", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Future[None]
        self._pump: Pump
        self._commits: GroupCommit

    # -- from any thread ------------------------------------------------------------------------

    def start(self) -> str:
        """Start the thread and return the address really bound."""
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise PeerLostError(f"the server thread did not bind {self._address} in time")
        if self.failure is not None:
            raise self.failure
        return self._bound

    def send(self, actor_id: str, message: ToActor) -> None:
        """Send after what was sent before. To an actor that is not there nothing is sent.

        It may get lost with its connection; then `hello` or `lost` of the handler follows.
        """
        frames = encode(message)
        self._call(lambda: self._send_frames(actor_id, frames))

    def announce(self, policy_version: int, paused: str = "") -> None:
        """What heartbeats say from now on. A full disk takes precedence over `paused`."""
        self._heartbeat = LearnerHeartbeat(policy_version=policy_version, paused=paused)

    def close(self, timeout_s: float = 10.0) -> None:
        """Commit and ack what came in, then stop. Raises what the server failed with."""
        if self._thread.ident is None:
            return
        self._call(lambda: self._end(None))
        self._thread.join(timeout_s + 5.0)
        if self._thread.is_alive():
            raise PeerLostError("the server thread does not end: its handler does not return")
        if self.failure is not None:
            raise self.failure

    def _call(self, function: Callable[[], None]) -> None:
        if self._started.is_set() and self._thread.is_alive():
            try:
                self._loop.call_soon_threadsafe(function)
            except RuntimeError:
                logger.debug("the server has ended; nothing is sent any more")

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseExceptionGroup as group:
            self._fail(group.exceptions[0])
        except BaseException as error:
            self._fail(error)
        finally:
            self._started.set()

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        if self._started.is_set():
            logger.error("the server ends: %s: %s", type(error).__name__, error)
            if self._on_failure is not None:
                self._on_failure(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._loop.set_exception_handler(
            lambda _, context: self._end(
                context.get("exception") or RuntimeError(context["message"])
            )
        )
        gate = None
        with zmq.Context() as context, ThreadPoolExecutor(1, "capo-writer") as writer:
            try:
                if self._keys is not None:
                    gate = ZapGate(context, self._keys.actors, self._end)
                self._pump = Pump(
                    self._bind(context), self._limits, self._receive, self._flush_all, self._end
                )
                self._commits = GroupCommit(self._handler.commit, self._committed, writer)
                self._started.set()
                async with asyncio.TaskGroup() as tasks:
                    writing = tasks.create_task(self._commits.run())
                    beating = tasks.create_task(self._beat())
                    await self._ended
                    await self._commits.drain(timeout_s=5.0)
                    writing.cancel()
                    beating.cancel()
            finally:
                if hasattr(self, "_pump"):
                    self._pump.close(LINGER_MS)
                if gate is not None:
                    gate.close()

    def _end(self, error: Exception | None) -> None:
        if not self._ended.done():
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)

    def _bind(self, context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(
            zmq.ROUTER_MANDATORY, 1
        )  # a peer that is gone or slow is an error, not a loss
        socket.setsockopt(zmq.MAXMSGSIZE, self._limits.max_message_bytes)
        socket.setsockopt(zmq.SNDHWM, 256)
        socket.setsockopt(zmq.RCVHWM, 256)
        socket.setsockopt(zmq.IPV6, int("[" in self._address))
        if self._keys is not None:
            self._keys.apply(socket)
        try:
            socket.bind(self._address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise CapoError(
                f"cannot listen on {self._address}: {error.strerror}; "
                "choose another network.bind, or port 0 for any free one"
            ) from None
        self._bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return socket

    async def _beat(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            stall = now - before - TICK_S
            before = now
            self._handler.tick()
            for session in list(self._sessions.values()):
                if session.gone:
                    continue
                if stall > STALL_S:
                    session.last_heard += stall
                if session.silent(now):
                    silent_s = now - session.last_heard
                    self._lose(session, f"nothing was heard of it for {silent_s:.0f} s")
                elif session.identity is not None and now >= session.next_heartbeat:
                    session.next_heartbeat = now + session.heartbeat_s
                    paused = self._commits.paused or self._heartbeat.paused
                    beat = msgspec.structs.replace(self._heartbeat, paused=paused)
                    self._send(session, encode(beat))
            self._flush_all()

    # -- incoming -------------------------------------------------------------------------------

    def _receive(self, parts: Parts) -> None:
        identity = parts[0]
        frames = parts[1:]
        session = self._by_identity.get(identity)
        try:
            message = self._decoder.decode(frames)
            if isinstance(message, Hello):
                self._hello(identity, message)
            elif session is None:
                self._stranger(identity, message)
            else:
                session.last_heard = time.monotonic()
                if isinstance(message, Delivery):
                    self._delivery(session, message, size_of(frames))
                elif isinstance(message, Goodbye):
                    self._lose(session, message.reason)
                else:
                    self._handler.control(session.actor_id, message)
        except ProtocolError as error:
            self.stats.malformed += 1
            reason = _newer_hello(frames[0] if frames else b"") or str(error)
            logger.warning("refused a message of %s: %s", _name(session), reason)
            self._refuse(identity, reason)

    def _hello(self, identity: bytes, hello: Hello) -> None:
        refusal = version_refusal(hello.protocol_version)
        if refusal:
            self._refuse(identity, refusal)
            return
        check_hello(hello)
        known = self._by_identity.get(identity)
        if known is not None and known.actor_id != hello.actor_id:
            raise ProtocolError(f"this connection is {known.actor_id}'s, not {hello.actor_id}'s")
        answer = self._handler.hello(hello)
        session = self._sessions.get(hello.actor_id)
        if isinstance(answer, Refused):
            if session is not None and not session.gone:
                self._lose(session, f"refused: {answer.reason}")
            self._refuse(identity, answer.reason)
            return
        if session is None:
            session = self._sessions[hello.actor_id] = Session(hello.actor_id, answer.last_sequence)
        elif session.identity is not None:
            self._by_identity.pop(session.identity, None)
        session.connect(identity, answer, time.monotonic())
        self._by_identity[identity] = session
        self._send(
            session,
            encode(
                msgspec.structs.replace(answer, max_message_bytes=self._limits.max_message_bytes)
            ),
        )

    def _stranger(self, identity: bytes, message: ToLearner) -> None:
        self.stats.strangers += 1
        if not isinstance(message, Goodbye):
            self._send_once(identity, encode(Reintroduce()))

    def _delivery(self, session: Session, delivery: Delivery, num_bytes: int) -> None:
        verdict = session.judge(delivery.sequence)
        if verdict is Verdict.NEXT:
            if self._commits.pending_bytes + num_bytes > self._max_pending_bytes:
                self.stats.over_memory += 1
                return
            check_delivery(delivery)
            session.accepted = delivery.sequence
            self._commits.add(session.actor_id, delivery, num_bytes)
            self.stats.deliveries += 1
            self.stats.records += len(delivery.steps) + len(delivery.ends)
            self.stats.bytes_accepted += num_bytes
        elif verdict is Verdict.COMMITTED:
            self.stats.duplicates += 1
            self._send(session, encode(Ack(sequence=session.committed)))
        elif verdict is Verdict.PENDING:
            self.stats.duplicates += 1
        elif verdict is Verdict.GAP:
            self.stats.gaps += 1
        else:
            self.stats.over_window += 1

    def _committed(self, deliveries: Deliveries) -> None:
        self.stats.commits += 1
        touched: dict[str, Session] = {}
        for actor_id, delivery in deliveries:
            session = touched[actor_id] = self._sessions[actor_id]
            session.committed = max(session.committed, delivery.sequence)
        for session in touched.values():
            if session.gone:
                self._forget(session)
            elif session.identity is not None:
                self._send(session, encode(Ack(sequence=session.committed)))

    # -- outgoing -------------------------------------------------------------------------------

    def _refuse(self, identity: bytes, reason: str) -> None:
        """Tell the sender why; whoever it was ends its work here, so its leases are free."""
        self.stats.refused += 1
        session = self._by_identity.get(identity)
        if session is not None:
            self._lose(session, f"refused: {reason}")
        self._send_once(identity, encode(Refused(reason=reason)))

    def _lose(self, session: Session, reason: str) -> None:
        if session.identity is not None:
            self._by_identity.pop(session.identity, None)
        session.disconnect()
        session.gone = True
        self._forget(session)
        self._handler.lost(session.actor_id, reason)

    def _forget(self, session: Session) -> None:
        self._blocked.discard(session)
        if session.committed == session.accepted:
            self._sessions.pop(session.actor_id, None)

    def _send_frames(self, actor_id: str, frames: list[Frame]) -> None:
        session = self._sessions.get(actor_id)
        if session is None or session.identity is None:
            self.stats.undeliverable += 1
        else:
            self._send(session, frames)

    def _send(self, session: Session, frames: list[Frame]) -> None:
        if len(session.outgoing) >= MAX_OUTGOING:
            self._lose(session, f"it does not read: {MAX_OUTGOING} messages wait for it")
            return
        session.outgoing.append(frames)
        self._flush(session)

    def _flush_all(self) -> None:
        for session in list(self._blocked):
            self._flush(session)

    def _flush(self, session: Session) -> None:
        while session.outgoing and session.identity is not None:
            try:
                sent = self._pump.send([session.identity, *session.outgoing[0]])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self.stats.undeliverable += len(session.outgoing)
                self._by_identity.pop(session.identity, None)
                session.disconnect()
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
        self.stats.undeliverable += not sent


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


def _newer_hello(header: bytes) -> str:
    """The version refusal if `header` is a Hello whose other fields we cannot read."""
    try:
        return version_refusal(msgspec.msgpack.decode(header, type=_AnyHello).protocol_version)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return ""


def _name(session: Session | None) -> str:
    return "a stranger" if session is None else session.actor_id
