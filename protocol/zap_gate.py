"""Answers libzmq's question who may connect, by the public keys that a learner accepts."""

from collections.abc import Iterable

import zmq
import zmq.utils.z85

from capo.protocol.frames import Limits
from capo.protocol.sockets import OnFailure, Parts, Pump


class ZapGate:
    """For all CURVE servers of one context, on the running loop.

    Every peer that it lets in is known to its server by its public key (`Pump.user_id`).
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        public_keys: Iterable[str],
        on_failure: OnFailure,
    ) -> None:
        self._allowed = {zmq.utils.z85.decode(key) for key in public_keys}
        socket = context.socket(zmq.REP)
        socket.bind("inproc://zeromq.zap.01")
        self._pump = Pump(socket, Limits(), self._answer, lambda: None, on_failure)

    def close(self) -> None:
        self._pump.close()

    def _answer(self, request: Parts) -> None:
        version, request_id = [*request, b"", b""][:2]
        known = len(request) == 7 and request[5] == b"CURVE" and request[6] in self._allowed
        if known:
            status, text, user_id = b"200", b"OK", zmq.utils.z85.encode(request[6])
        else:
            status, text, user_id = b"400", b"this key is not accepted", b""
        self._pump.send([version, request_id, status, text, user_id, b""])
