"""The actor's end of the wire: one DEALER socket on the actor's own event loop.

It introduces itself again after every break, for ever, and delivers again what was not acked; so
the learner may be killed and come back without anything lost. What the records and messages mean is
the worker's business.
"""

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

import zmq
from zmq.utils.monitor import parse_monitor_message

from capo.protocol.errors import CapoError, PeerLostError, RefusedError
from capo.protocol.frames import MIB, Frame, FrameDecoder, Limits, encode
from capo.protocol.keys import ActorKeys
from capo.protocol.messages import (
    Ack,
    ActorHeartbeat,
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
from capo.protocol.outbox import Outbox, Parcel, size_of_records
from capo.protocol.records import EpisodeEnd, Step
from capo.protocol.sockets import Parts, Pump
from capo.protocol.validate import check_end, check_step

TICK_S = 0.1
STALL_S = 1.0  # a tick that comes this late was our own doing, not the learner's silence
LINGER_MS = 500
FIRST_RETRY_S = 0.2
LAST_RETRY_S = 5.0
REMIND_S = 30.0
MAX_CONTROLS = 256
MAX_INBOX = 4096
SETUP_LIMITS = Limits(max_header_bytes=256 * MIB, max_message_bytes=256 * MIB)

logger = logging.getLogger(__name__)


class ActorClient:
    """An async context manager; all methods are for the loop that entered it.

    `make_hello` is called for every introduction and says what the actor holds at that moment;
    `make_heartbeat` likewise. Without contact for `patience_s` it gives up with PeerLostError.
    """

    def __init__(
        self,
        address: str,
        make_hello: Callable[[], Hello],
        keys: ActorKeys | None = None,
        *,
        make_heartbeat: Callable[[], ActorHeartbeat] = ActorHeartbeat,
        resend_after_s: float = 5.0,
        hello_timeout_s: float = 10.0,
        patience_s: float = math.inf,
        log_after_s: float = 10.0,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.paused = ""  # why the learner grants or commits nothing, as it says
        self.policy_version = 0  # the learner's, by its last heartbeat
        self._address = address
        self._make_hello = make_hello
        self._make_heartbeat = make_heartbeat
        self._keys = keys
        self._resend_after_s = resend_after_s
        self._hello_timeout_s = hello_timeout_s
        self._patience_s = patience_s
        self._log_after_s = log_after_s
        self._jitter = jitter
        self._decoder: FrameDecoder[ToActor] = FrameDecoder(ToActor, SETUP_LIMITS)
        self._outbox = Outbox(Limits())
        self._controls: deque[list[Frame]] = deque()
        self._inbox: deque[ToActor] = deque()
        self._failure: CapoError | None = None
        self._closed = False
        self._leaving = False
        # The connection
        self._pump: Pump | None = None
        self._monitor: Pump | None = None
        self._welcome: Welcome | None = None
        self._connected = False
        self._hello_sent_at: float | None = None
        self._hello_attempts = 0
        self._reopen_at = 0.0
        self._note = "nobody has answered yet"
        # Moments of the loop's clock
        self._last_heard = 0.0
        self._next_heartbeat = 0.0
        self._last_progress = 0.0
        self._resend_factor = 1.0
        self._alone_since = 0.0
        self._next_reminder = 0.0
        self._packing = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()  # the inbox, or the end
        self._settled = asyncio.Event()  # everything is acked, or the end
        self._room = asyncio.Event()  # for a control message, or the end
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._alone_since = self._loop.time()
        self._next_reminder = self._alone_since + self._log_after_s
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._keeper = self._tasks.create_task(self._keep())
        self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed = True
        self._keeper.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            self._disconnect(LINGER_MS)
            self._wake_all(CapoError("the connection to the learner was closed"))
            await asyncio.to_thread(self._context.term)

    # -- for the worker -------------------------------------------------------------------------

    async def messages(self) -> AsyncIterator[ToActor]:
        """All that the learner says but Ack, LearnerHeartbeat and Reintroduce, until the end.

        A Welcome comes after every (re)connect: what was given to `send` before it may be lost, so
        repeat what still holds (Ready). Raises RefusedError when the learner refuses this actor.
        """
        while True:
            while self._inbox:
                yield self._inbox.popleft()
            if self._closed:
                return
            self._check()
            self._news.clear()
            await self._news.wait()

    async def deliver(self, steps: Sequence[Step] = (), ends: Sequence[EpisodeEnd] = ()) -> None:
        """Hand over records that stay together, in order; returns when the window took them.

        From then on they are delivered again until acked. Cancelled before, nothing is delivered.
        Raises ProtocolError for a record the learner would refuse.
        """
        self._check()
        if not steps and not ends:
            return
        for step in steps:
            check_step(step)
        for end in ends:
            check_end(end)
        parcel = Parcel(
            tuple(steps), tuple(ends), size_of_records(steps, ends), self._loop.create_future()
        )
        self._outbox.put(parcel)
        self._settled.clear()
        if not self._packing:  # what is delivered in this turn of the loop travels together
            self._packing = True
            self._loop.call_soon(self._pack)
        try:
            await parcel.packed
        except asyncio.CancelledError:
            self._outbox.withdraw(parcel)
            raise

    async def send(self, message: ToLearner) -> None:
        """Send a control message; it waits here while there is no connection."""
        self._check()
        if isinstance(message, Hello | Delivery):
            raise ValueError(f"{type(message).__name__} is sent by the client itself")
        while len(self._controls) >= MAX_CONTROLS:
            self._room.clear()
            await self._room.wait()
            self._check()
        self._controls.append(encode(message))
        self._leaving = self._leaving or isinstance(message, Goodbye)
        self._flush()

    async def flush(self, timeout_s: float) -> None:
        """Return when everything delivered is acked; raises PeerLostError after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._outbox.empty:
                    self._check()
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            waiting = self._outbox.num_unacked + self._outbox.num_waiting
            raise PeerLostError(
                f"the learner at {self._address} did not ack {waiting} deliveries within "
                f"{timeout_s:.0f} s{self._why()}"
            ) from None
        self._check()

    # -- the pulse ------------------------------------------------------------------------------

    async def _keep(self) -> None:
        before = self._loop.time()
        while self._failure is None:
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            stall = now - before - TICK_S
            before = now
            if stall > STALL_S:
                self._last_heard += stall
                if self._hello_sent_at is not None:
                    self._hello_sent_at += stall
            try:
                self._tick(now)
            except Exception as error:
                self._fail(error)

    def _tick(self, now: float) -> None:
        if self._connected and self._welcome is not None:
            if now - self._last_heard > self._welcome.dead_after_s:
                self._note = f"it said nothing for {now - self._last_heard:.0f} s"
                self._retry(now)
            elif now >= self._next_heartbeat and not self._leaving:
                self._next_heartbeat = now + self._welcome.heartbeat_s
                if len(self._controls) < MAX_CONTROLS:
                    self._controls.append(encode(self._make_heartbeat()))
            self._resend_late(now)
        elif self._pump is None:
            if now >= self._reopen_at:
                self._open()
        elif self._hello_sent_at is not None and now - self._hello_sent_at > self._hello_timeout_s:
            self._note = "it takes the connection but does not answer Hello"
            self._retry(now)
        self._flush()
        if not self._connected:
            self._remind(now)

    def _resend_late(self, now: float) -> None:
        if not self._outbox.num_unacked or self.paused:
            self._last_progress = now
        elif now - self._last_progress > self._resend_after_s * self._resend_factor:
            logger.info(
                "no ack from %s for %.0f s: sending again", self._address, self._resend_after_s
            )
            self._last_progress = now
            self._resend_factor = min(2 * self._resend_factor, 8.0)
            self._outbox.rewind()

    def _remind(self, now: float) -> None:
        alone_s = now - self._alone_since
        if alone_s > self._patience_s:
            raise PeerLostError(
                f"no contact with the learner at {self._address} for {alone_s:.0f} s{self._why()}"
            )
        if now >= self._next_reminder:
            self._next_reminder = now + REMIND_S
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - alone_s))
            logger.warning(
                "waiting for the learner at %s since %s (%.0f s)%s",
                self._address,
                since,
                alone_s,
                self._why(),
            )

    def _why(self) -> str:
        if not self._connected:
            return f": {self._note}"
        return f": {self.paused}" if self.paused else ""

    # -- the connection -------------------------------------------------------------------------

    def _open(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues for a learner that is not there
        socket.setsockopt(zmq.MAXMSGSIZE, SETUP_LIMITS.max_message_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)  # libzmq adds its own jitter
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(LAST_RETRY_S * 1000))
        socket.setsockopt(zmq.IPV6, int("[" in self._address))
        if self._keys is not None:
            self._keys.apply(socket)
        monitor = socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CONNECT_RETRIED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        try:
            socket.connect(self._address)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)
            raise CapoError(
                f"cannot connect to {self._address!r}: {error.strerror}; "
                "an address looks like tcp://host:port"
            ) from None
        self._socket = socket
        self._pump = Pump(socket, SETUP_LIMITS, self._receive, self._flush, self._fail)
        self._monitor = Pump(monitor, Limits(), self._observe, lambda: None, self._fail)
        self._introduce()

    def _disconnect(self, linger_ms: int) -> None:
        self._set_alone()
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
            self._monitor = None
        if self._pump is not None:
            self._pump.close(linger_ms)
            self._pump = None

    def _retry(self, now: float) -> None:
        """Give this connection up and make another one a little later."""
        self._disconnect(0)
        delay_s = min(FIRST_RETRY_S * 2**self._hello_attempts, LAST_RETRY_S)
        self._hello_attempts += 1
        self._reopen_at = now + delay_s * (0.5 + self._jitter())

    def _introduce(self) -> None:
        self._set_alone()
        self._hello_sent_at = None
        self._flush()

    def _set_alone(self) -> None:
        if self._connected:
            self._connected = False
            self._alone_since = self._loop.time()
            self._next_reminder = self._alone_since + self._log_after_s

    def _flush(self) -> None:
        """Send what is due as far as the socket takes it."""
        if self._pump is None:
            return
        if not self._connected:
            if self._hello_sent_at is None and self._pump.send(encode(self._make_hello())):
                self._hello_sent_at = self._loop.time()
            return
        while self._controls:
            if not self._pump.send(self._controls[0]):
                return
            self._controls.popleft()
            self._room.set()
        while (frames := self._outbox.due()) is not None:
            if not self._pump.send(frames):
                return
            self._outbox.sent()

    def _pack(self) -> None:
        self._packing = False
        if self._failure is not None or self._closed:
            return
        if not self._outbox.num_unacked:
            self._last_progress = self._loop.time()
        try:
            self._outbox.pack()
            self._flush()
        except Exception as error:
            self._fail(error)

    # -- incoming -------------------------------------------------------------------------------

    def _receive(self, parts: Parts) -> None:
        message = self._decoder.decode(parts)
        self._last_heard = self._loop.time()
        if isinstance(message, Ack):
            if self._outbox.ack(message.sequence):
                self._on_progress()
        elif isinstance(message, LearnerHeartbeat):
            self.policy_version = message.policy_version
            self._set_paused(message.paused)
        elif isinstance(message, Reintroduce):
            if self._hello_sent_at is None or self._connected:
                self._note = "it came back and does not know this actor yet"
                if not self._leaving:
                    self._introduce()
        elif isinstance(message, Refused):
            raise RefusedError(
                f"the learner at {self._address} refused this actor: {message.reason}"
            )
        else:
            if isinstance(message, Welcome):
                self._welcomed(message)
            if len(self._inbox) >= MAX_INBOX:
                raise CapoError(f"{MAX_INBOX} messages of the learner wait and nobody reads them")
            self._inbox.append(message)
            self._news.set()

    def _welcomed(self, welcome: Welcome) -> None:
        if self._welcome is not None and self._welcome.run_id != welcome.run_id:
            raise RefusedError(
                f"the learner at {self._address} now works on run {welcome.run_id}, this actor on "
                f"{self._welcome.run_id}; start the actor anew"
            )
        now = self._loop.time()
        self._welcome = welcome
        self._connected = True
        self._hello_attempts = 0
        self._next_heartbeat = now + welcome.heartbeat_s
        self._outbox.welcome(welcome)
        logger.info(
            "connected to %s at %s, run %s", welcome.learner_name, self._address, welcome.run_id
        )
        self._on_progress()

    def _on_progress(self) -> None:
        self._last_progress = self._loop.time()
        self._resend_factor = 1.0
        self._outbox.pack()
        if self._outbox.empty:
            self._settled.set()
        self._flush()

    def _set_paused(self, paused: str) -> None:
        if paused and not self.paused:
            logger.warning("the learner at %s pauses: %s", self._address, paused)
        self.paused = paused

    def _observe(self, parts: Parts) -> None:
        """What libzmq says about the connection."""
        event = parse_monitor_message(parts)["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise RefusedError(
                f"the learner at {self._address} does not let this actor's key in; "
                "make one with `capo keygen`, or add its public key to the learner's key file"
            )
        if event == zmq.EVENT_CONNECT_RETRIED:
            self._note = "nobody listens there"
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._note = "it takes the connection but did not answer Hello yet"
        elif event == zmq.EVENT_DISCONNECTED:
            self._note = "the connection broke"
            if not self._leaving:
                self._introduce()
        else:
            self._note = "the handshake failed: a wrong learner key, or only one side uses keys"

    # -- the end --------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            if isinstance(error, CapoError):
                failure = error
            else:
                failure = CapoError(f"the wire broke: {error!r}")
                failure.__cause__ = error
            self._failure = failure
            self._disconnect(0)
            self._wake_all(failure)

    def _wake_all(self, error: CapoError) -> None:
        self._outbox.fail(error)
        self._news.set()
        self._settled.set()
        self._room.set()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise CapoError("the connection to the learner was closed")
