"""The actor's connection to the learner: made, introduced, watched, given up and made again.

Hello is the only message that it knows. `connected` is true between the learner's Welcome and the
next break; nothing but Hello goes out while it is false.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import zmq
from msgspec import Struct
from zmq.utils.monitor import parse_monitor_message

from capo.protocol.errors import CapoError, PeerLostError, RefusedError
from capo.protocol.frames import MIB, Frame, Limits, encode
from capo.protocol.keys import ActorKeys
from capo.protocol.messages import Hello
from capo.protocol.sockets import OnFailure, Parts, Pump

FIRST_RETRY_S = 0.2
LAST_RETRY_S = 5.0
REMIND_S = 30.0
REOPEN_S = 10.0  # without a connection: the learner may have moved, and libzmq may have given up
NO_HANDSHAKE = "no handshake: the learner's key does not match, or only one side uses keys"
SETUP_LIMITS = Limits(max_header_bytes=256 * MIB, max_message_bytes=256 * MIB)

logger = logging.getLogger(__name__)


class Patience(Struct, frozen=True, kw_only=True):
    """How long each thing is waited for before something is done about it."""

    hello_s: float  # for a Welcome, then the connection is made again
    log_s: float  # without the learner, then the log says so
    total_s: float  # without the learner, then PeerLostError


def dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: ActorKeys | None
) -> "zmq.Socket[bytes]":
    """A socket to be connected to the learner at `address`."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues for a learner that is not there
    socket.setsockopt(zmq.MAXMSGSIZE, SETUP_LIMITS.max_message_bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, int(FIRST_RETRY_S * 1000))  # libzmq adds jitter
    socket.setsockopt(zmq.IPV6, int("[" in address))
    if keys is not None:
        keys.apply(socket)
    return socket


class Link:
    """A DEALER socket on the running loop. `locate` is asked where the learner is before every
    connection is made. Callbacks as in Pump; `jitter` draws from [0, 1)."""

    def __init__(
        self,
        *,
        locate: Callable[[], str],
        keys: ActorKeys | None,
        make_hello: Callable[[], Hello],
        patience: Patience,
        jitter: Callable[[], float],
        on_message: Callable[[Parts], None],
        on_ready: Callable[[], None],
        on_failure: OnFailure,
    ) -> None:
        self.connected = False
        self.leaving = False  # never introduce itself again, whatever happens
        self.address = locate()
        self._locate = locate
        self._keys = keys
        self._make_hello = make_hello
        self._patience = patience
        self._jitter = jitter
        self._on_message = on_message
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pump: Pump | None = None
        self._close_monitor: Callable[[], None] = lambda: None
        self._opened_at = 0.0
        self._hello_sent_at: float | None = None
        self._retries = 0
        self._note = "nobody has answered yet"
        self._reopen_at = self._alone_since = self._loop.time()
        self._remind_at = self._alone_since + patience.log_s

    def open(self) -> None:
        """Connect in the background; raises CapoError for an address that cannot be one."""
        self.address = self._locate()
        socket = dealer(self._context, self.address, self._keys)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(LAST_RETRY_S * 1000))
        monitor = socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CLOSED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        try:
            socket.connect(self.address)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)
            raise CapoError(
                f"cannot connect to {self.address!r}: {error.strerror}; "
                "an address looks like tcp://host:port"
            ) from None
        watch = Pump(monitor, Limits(), self._observe, lambda: None, self._on_failure)

        def close_monitor() -> None:
            socket.disable_monitor()  # blocks if nobody is there to take its last event
            watch.close()

        self._close_monitor = close_monitor
        self._opened_at = self._loop.time()
        self._pump = Pump(socket, SETUP_LIMITS, self._on_message, self._on_ready, self._on_failure)
        self.introduce()

    def close(self, linger_ms: int = 0) -> None:
        """Break the connection; what was sent has `linger_ms` to leave."""
        self._set_alone()
        if self._pump is not None:
            self._close_monitor()
            self._pump.close(linger_ms)
            self._pump = None

    def terminate(self) -> None:
        """Free libzmq's threads after `close`; may block until what lingers has left."""
        self._context.term()

    def send(self, frames: Sequence[Frame]) -> bool:
        """Send now or return False: not connected, or the socket takes no more."""
        return self.connected and self._pump is not None and self._pump.send(frames)

    def introduce(self) -> None:
        """Say Hello on this connection, as soon as it takes it."""
        self._set_alone()
        self._hello_sent_at = None
        self._say_hello()

    def welcomed(self) -> None:
        self.connected = True
        self._retries = 0

    def forgotten(self) -> None:
        """The learner does not know this connection. Says Hello, unless one is on its way."""
        if self.connected and not self.leaving:
            self._note = "it came back and does not know this actor yet"
            self.introduce()

    def give_up(self, note: str) -> None:
        """Break this connection and make another one a little later."""
        self._note = note
        self.close()
        delay_s = min(FIRST_RETRY_S * 2.0**self._retries, LAST_RETRY_S)
        self._retries = min(self._retries + 1, 16)
        self._reopen_at = self._loop.time() + delay_s * (0.5 + self._jitter())

    def tick(self, now: float, stall_s: float) -> None:
        """Do what is due; raises PeerLostError when patience is over. `stall_s`: time lost here."""
        if self.connected or self.leaving:
            return
        if self._pump is None:
            if now >= self._reopen_at:
                self.open()
        elif self._hello_sent_at is None:
            self._say_hello()
            if self._hello_sent_at is None and now - self._opened_at > REOPEN_S:
                self.give_up(self._note)
        else:
            self._hello_sent_at += stall_s
            if now - self._hello_sent_at > self._patience.hello_s:
                self.give_up("it accepts the connection but does not answer Hello")
        alone_s = now - self._alone_since
        if alone_s > self._patience.total_s:
            raise PeerLostError(
                f"no contact with the learner at {self.address} for {alone_s:.0f} s: {self._note}"
            )
        if now >= self._remind_at:
            self._remind_at = now + REMIND_S
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - alone_s))
            logger.warning(
                "waiting for the learner at %s since %s: %s", self.address, since, self._note
            )

    @property
    def trouble(self) -> str:
        """Why there is no connection, "" if there is one."""
        return "" if self.connected else self._note

    def _say_hello(self) -> None:
        if self._pump is not None and self._pump.send(encode(self._make_hello())):
            self._hello_sent_at = self._loop.time()

    def _set_alone(self) -> None:
        if self.connected:
            self.connected = False
            self._alone_since = self._loop.time()
            self._remind_at = self._alone_since + self._patience.log_s

    def _observe(self, parts: Parts) -> None:
        """What libzmq says about the connection."""
        event = parse_monitor_message(parts)["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise RefusedError(
                f"the learner at {self.address} does not accept this actor's key; "
                "make one with `capo keygen`, or add its public key to the learner's key file"
            )
        if event == zmq.EVENT_CLOSED:
            self._note = "nothing is listening there"
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._note = "it accepts the connection but has not answered Hello yet"
            if not self.connected and self._hello_sent_at is None:
                self._say_hello()
        elif event == zmq.EVENT_DISCONNECTED:
            if self.connected or self._hello_sent_at is not None:
                self._note = "the connection broke"
            if not self.leaving:
                self.introduce()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._note = NO_HANDSHAKE
        else:
            self.give_up(NO_HANDSHAKE)  # libzmq does not try again after this
