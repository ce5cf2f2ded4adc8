"""Asks a learner for its status: one question and one answer on a connection of its own."""

import math
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from capo.protocol.errors import CapoError, PeerLostError, RefusedError
from capo.protocol.frames import FrameDecoder, encode
from capo.protocol.keys import ActorKeys
from capo.protocol.link import NO_HANDSHAKE, SETUP_LIMITS
from capo.protocol.messages import Refused, StatusReport, StatusRequest, ToActor

_FAULTS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not let this key in",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: NO_HANDSHAKE,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: NO_HANDSHAKE,
}
_STUCK = (
    "it takes the connection but does not answer: its process is frozen or stuck, or it is no "
    "learner of capo"
)
_NOTES = _FAULTS | {
    zmq.EVENT_CLOSED: "nobody listens there",
    zmq.EVENT_CONNECTED: _STUCK,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: _STUCK,
}


def ask_status(address: str, keys: ActorKeys | None = None, timeout_s: float = 5.0) -> bytes:
    """JSON of a LearnerStatus. Blocks for at most `timeout_s`.

    Raises:
        RefusedError: it does not answer such questions, or not to this key.
        PeerLostError: there was no answer in time; the message names the last thing seen.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, SETUP_LIMITS.max_message_bytes)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        if keys is not None:
            keys.apply(socket)
        monitor = socket.get_monitor_socket(sum(_NOTES))
        try:
            socket.connect(address)
            socket.send_multipart(encode(StatusRequest()))
            return _answer(socket, monitor, address, timeout_s)
        except zmq.ZMQError as error:
            raise CapoError(f"cannot connect to {address}: {error.strerror}") from None
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)


def _answer(
    socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]", address: str, timeout_s: float
) -> bytes:
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    note = "nobody has answered yet"
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        ready = dict(poller.poll(math.ceil(left_s * 1e3)))
        if socket in ready:
            decoder: FrameDecoder[ToActor] = FrameDecoder(ToActor, SETUP_LIMITS)
            message = decoder.decode(socket.recv_multipart())
            if isinstance(message, StatusReport):
                return message.status
            if isinstance(message, Refused):
                raise RefusedError(f"the learner at {address} does not tell: {message.reason}")
        if monitor in ready:
            event = recv_monitor_message(monitor)["event"]
            note = _NOTES[zmq.Event(event)]
            if event in _FAULTS:
                raise RefusedError(f"the learner at {address} does not tell: {note}")
    raise PeerLostError(f"no status from {address} in {timeout_s:g} s: {note}")
