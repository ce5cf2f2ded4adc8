"""The learner's end of the wire: one ROUTER socket on a thread and an event loop of its own.

This module is the server's life: bind, beat, fail, close. What happens to a message is in
`exchange`, what the learner does with it in its Handler.
"""

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import uvloop
import zmq
from msgspec import Struct
from msgspec.structs import replace

from capo.protocol.errors import CapoError, PeerLostError
from capo.protocol.exchange import Exchange
from capo.protocol.frames import MIB, Limits, encode
from capo.protocol.handler import Handler as Handler
from capo.protocol.handler import ServerStats as ServerStats
from capo.protocol.keys import LearnerKeys, check_bind
from capo.protocol.messages import LearnerHeartbeat, ToActor
from capo.protocol.zap_gate import ZapGate

TICK_S = 0.1
START_TIMEOUT_S = 10.0
LINGER_MS = 500
HIGH_WATER_MARK = 256  # messages that libzmq queues per actor and direction

logger = logging.getLogger(__name__)


class _Running(Struct, frozen=True):
    """What the thread of a server has made, once it can be spoken to."""

    address: str  # as it was bound
    loop: asyncio.AbstractEventLoop
    exchange: Exchange
    end: Callable[[Exception | None], None]


class Server:
    """Everything public may be called from any thread.

    `limits` bound one message, `max_pending_bytes` all that wait for the writer. An exception of
    the handler ends the server: it is in `failure`, goes to `on_failure` (on the server's thread),
    and `close` raises it.
    """

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
        self._heartbeat = LearnerHeartbeat()
        self._drain_s = 0.0
        self._running: _Running | None = None
        self._started = threading.Event()  # or failed to
        self._thread = threading.Thread(target=self._run, name="capo-server", daemon=True)

    def start(self) -> str:
        """Bind, and return the address as it was bound; raises CapoError if that fails."""
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise PeerLostError(f"the server thread did not bind {self._address} in time")
        if self.failure is not None:
            raise self.failure
        assert self._running is not None
        return self._running.address

    def send(self, actor_id: str, message: ToActor) -> None:
        """Send, in the order of calls. To an actor that is not connected nothing is sent.

        It may get lost with its connection; `hello` or `lost` of the handler follows then.
        """
        frames = encode(message)
        self._call(lambda running: running.exchange.send(actor_id, frames))

    def announce(self, policy_version: int, paused: str = "") -> None:
        """What heartbeats say from now on. A full disk takes precedence over `paused`."""
        self._heartbeat = LearnerHeartbeat(policy_version=policy_version, paused=paused)

    @property
    def storage_trouble(self) -> str:
        """Why deliveries wait for the disk at present, "" if they do not."""
        return self._running.exchange.commits.paused if self._running is not None else ""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop, to look at its tasks. Raises ValueError before `start`."""
        if self._running is None:
            raise ValueError("the server has not been started")
        return self._running.loop

    @property
    def commit_s(self) -> float:
        """How long the commit that is going on has taken so far, 0 if there is none."""
        if self._running is None:
            return 0.0
        begun_at = self._running.exchange.commits.begun_at
        return 0.0 if begun_at is None else time.monotonic() - begun_at

    def close(self, timeout_s: float = 5.0) -> None:
        """Commit and ack what came in, then stop. Raises what the server failed with."""
        if self._thread.ident is None:
            return
        self._drain_s = timeout_s
        self._call(lambda running: running.end(None))
        self._thread.join(timeout_s + START_TIMEOUT_S)
        if self._thread.is_alive():
            raise PeerLostError("the server thread does not end: its handler does not return")
        if self.failure is not None:
            raise self.failure

    def _call(self, function: Callable[[_Running], None]) -> None:
        running = self._running
        if running is not None and self._thread.is_alive():
            try:
                running.loop.call_soon_threadsafe(function, running)
            except RuntimeError:  # the loop was closed in this moment
                logger.debug("the server has ended; nothing more is sent")

    # -- on the server's thread -----------------------------------------------------------------

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
        if self._running is not None:
            logger.error("the server ends: %s: %s", type(error).__name__, error)
            if self._on_failure is not None:
                self._on_failure(error)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        end = functools.partial(_settle, ended)
        loop.set_exception_handler(
            lambda _, context: end(context.get("exception") or RuntimeError(context["message"]))
        )
        with zmq.Context() as context, ThreadPoolExecutor(1, "capo-writer") as writer:
            gate = None
            if self._keys is not None:
                gate = ZapGate(context, self._keys.actors, end)
            try:
                socket = self._bind(context)
                address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
                exchange = Exchange(
                    socket,
                    self._handler,
                    writer=writer,
                    stats=self.stats,
                    limits=self._limits,
                    max_pending_bytes=self._max_pending_bytes,
                    keyed=self._keys is not None,
                    on_failure=end,
                )
                try:
                    self._running = _Running(address, loop, exchange, end)
                    self._started.set()
                    await self._live(exchange, ended)
                finally:
                    exchange.close(LINGER_MS)
            finally:
                if gate is not None:
                    gate.close()

    async def _live(self, exchange: Exchange, ended: "asyncio.Future[None]") -> None:
        """Until `close`, or until something fails."""
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(exchange.commits.run())
            beating = tasks.create_task(self._beat(exchange))
            await ended
            await exchange.drain(self._drain_s)
            for task in (writing, beating):
                task.cancel()

    def _bind(self, context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # who is gone or slow is an error, not a loss
        socket.setsockopt(zmq.MAXMSGSIZE, self._limits.max_message_bytes)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
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
        return socket

    async def _beat(self, exchange: Exchange) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            stall_s = max(0.0, now - before - TICK_S)  # our own doing, not the actors' silence
            before = now
            self._handler.tick()
            heartbeat = self._heartbeat
            if exchange.commits.paused:
                heartbeat = replace(heartbeat, paused=exchange.commits.paused)
            exchange.beat(now, stall_s, heartbeat)


def _settle(ended: "asyncio.Future[None]", error: Exception | None) -> None:
    """End the server of this future: with `error`, or because it was asked to."""
    if not ended.done():
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)
