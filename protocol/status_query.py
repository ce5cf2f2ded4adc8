"""Asks a learner for its status: one question and one answer on a connection of its own."""

import contextlib
import functools
import math
import operator
import time
from socket import getaddrinfo
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from capo.protocol.errors import CapoError, PeerLostError, RefusedError
from capo.protocol.frames import FrameDecoder, encode
from capo.protocol.keys import ActorKeys
from capo.protocol.link import NO_HANDSHAKE, SETUP_LIMITS, dealer
from capo.protocol.messages import Refused, StatusReport, StatusRequest, ToActor

POLL_S = 0.05

_STUCK = (
    "it accepts the connection but does not answer: its process is frozen or stuck, or it is "
    "not a capo learner"
)
_NOTES = {
    zmq.EVENT_CLOSED: "nothing is listening there",
    zmq.EVENT_CONNECTED: _STUCK,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: _STUCK,
    zmq.EVENT_DISCONNECTED: "it closes the connection",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: NO_HANDSHAKE,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: NO_HANDSHAKE,
}
_AFTER_ANY_FAILURE = (zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECTED)


def ask_status(address: str, keys: ActorKeys | None = None, timeout_s: float = 10.0) -> bytes:
    """JSON of a LearnerStatus. Blocks for at most `timeout_s`, and while a name is looked up.

    Raises:
        RefusedError: it does not answer such questions, or not to this key.
        PeerLostError: there was no answer in time; the message names the last thing seen.
    """
    _look_up(address)
    with zmq.Context() as context, dealer(context, address, keys) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        monitor = socket.get_monitor_socket(
            functools.reduce(operator.or_, [*_NOTES, zmq.EVENT_HANDSHAKE_FAILED_AUTH])
        )
        try:
            socket.connect(address)
            return _answer(socket, monitor, address, timeout_s)
        except zmq.ZMQError as error:
            raise CapoError(f"cannot connect to {address}: {error.strerror}") from None
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)


def _answer(
    socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]", address: str, timeout_s: float
) -> bytes:
    """Asks on every new connection: a learner that came back does not know the question."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    note = "nobody has answered yet"
    asked = False
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        if not asked:
            with contextlib.suppress(zmq.Again):
                socket.send_multipart(encode(StatusRequest()), zmq.DONTWAIT)
                asked = True
        ready = dict(poller.poll(math.ceil((left_s if asked else min(left_s, POLL_S)) * 1e3)))
        if socket in ready:
            decoder: FrameDecoder[ToActor] = FrameDecoder(ToActor, SETUP_LIMITS)
            message = decoder.decode(socket.recv_multipart())
            if isinstance(message, StatusReport):
                return message.status
            if isinstance(message, Refused):
                raise RefusedError(f"the learner at {address} gives no status: {message.reason}")
        if monitor in ready:
            event = recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise RefusedError(
                    f"the learner at {address} gives no status: it does not accept this key"
                )
            asked = asked and event != zmq.EVENT_DISCONNECTED
            if note != NO_HANDSHAKE or event not in _AFTER_ANY_FAILURE:
                note = _NOTES[zmq.Event(event)]
    raise PeerLostError(f"no status from {address} in {timeout_s:g} s: {note}")


def _look_up(address: str) -> None:
    """Raises PeerLostError for a name without an address, which libzmq would retry silently."""
    host = urlsplit(address).hostname
    try:
        getaddrinfo(host, None)
    except OSError as error:
        raise PeerLostError(f"there is no machine named {host!r}: {error.strerror}") from None
