"""One ZeroMQ socket on an asyncio loop, without a future per message.

libzmq's descriptor signals edges, and any call on the socket may swallow one; so after every send
the socket is looked at again. Nothing here blocks, and nothing here queues: a message that cannot
go out now is the caller's.
"""

import asyncio
from collections.abc import Callable, Sequence

import zmq

from capo.protocol.frames import Frame, Limits

BURST = 256  # messages read before the loop gets another turn

Parts = list[bytes]
OnFailure = Callable[[Exception], None]


class Pump:
    """Hands every incoming message to `on_message`; `on_ready` follows whenever sending may go on.

    A message beyond `limits` is cut off where it exceeds them, so that the decoder sees that it is
    too large while no more than that is kept. An exception of a callback goes to `on_failure`;
    nothing more is read then, and the owner closes the pump.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        limits: Limits,
        on_message: Callable[[Parts], None],
        on_ready: Callable[[], None],
        on_failure: OnFailure,
    ) -> None:
        self._socket = socket
        self._max_parts = limits.max_frames + 2  # a routing id, and one that is too many
        self._max_bytes = limits.max_message_bytes
        self._on_message = on_message
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.fileno()
        self._scheduled = False
        self._reading = True
        self._latest: zmq.Frame | None = None
        self._loop.add_reader(self._descriptor, self._wake)
        self._schedule()

    def send(self, parts: Sequence[Frame]) -> bool:
        """Send now or return False. Raises zmq.ZMQError when the peer is gone (ROUTER)."""
        try:
            self._socket.send_multipart(parts, zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return False
        finally:
            self._schedule()
        return True

    @property
    def user_id(self) -> str:
        """The sender of the message that `on_message` has now, as a ZapGate knows it."""
        if self._latest is None:
            raise ValueError("there is no message yet")
        return str(self._latest.get("User-Id"))

    def close(self, linger_ms: int = 0) -> None:
        """Stop and close the socket; what was sent has `linger_ms` to leave."""
        self._stop()
        self._socket.close(linger=linger_ms)

    def _stop(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._descriptor)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        if not self._reading:
            return
        self._scheduled = True  # what the callbacks send is followed by a look below
        try:
            more = self._drain()
            if self._reading:
                self._on_ready()
            more = more or self._drain()
        except Exception as error:
            self._stop()
            self._on_failure(error)
            return
        self._scheduled = False
        if more:
            self._schedule()

    def _drain(self) -> bool:
        for _ in range(BURST):
            if not self._reading:
                return False
            try:
                first = self._socket.recv(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return False
            self._latest = first
            self._on_message(self._receive_rest(first))
        return True

    def _receive_rest(self, frame: zmq.Frame) -> Parts:
        parts = [frame.bytes]
        size = 0
        while frame.more:
            frame = self._socket.recv(zmq.DONTWAIT, copy=False)
            if len(parts) < self._max_parts and size <= self._max_bytes:
                part = frame.bytes
                parts.append(part)
                size += len(part)
        return parts
