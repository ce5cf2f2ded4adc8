"""The actor's end of the wire, on the actor's own event loop.

It delivers again what was not acked and introduces itself again after every break, for ever; so the
learner may be killed and come back without anything lost. What the records and messages mean is the
worker's business.
"""

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

from capo.protocol.errors import CapoError, PeerLostError, RefusedError
from capo.protocol.frames import Frame, FrameDecoder, Limits, encode
from capo.protocol.keys import ActorKeys
from capo.protocol.link import SETUP_LIMITS, Link, Patience
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
from capo.protocol.sockets import Parts
from capo.protocol.validate import check_end, check_step

TICK_S = 0.1
LINGER_MS = 500
MAX_RESEND_FACTOR = 8.0
MAX_CONTROLS = 256  # control messages that wait for the connection
MAX_INBOX = 4096  # messages that wait for the worker

logger = logging.getLogger(__name__)


class ActorClient:
    """An async context manager; everything is for the loop that entered it.

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
        self._keys = keys
        self._make_heartbeat = make_heartbeat
        self._resend_after_s = resend_after_s
        self._patience = Patience(hello_s=hello_timeout_s, log_s=log_after_s, total_s=patience_s)
        self._jitter = jitter
        self._decoder: FrameDecoder[ToActor] = FrameDecoder(ToActor, SETUP_LIMITS)
        self._outbox = Outbox(Limits())
        self._controls: deque[list[Frame]] = deque()
        self._inbox: deque[ToActor] = deque()
        self._welcome: Welcome | None = None
        self._failure: CapoError | None = None
        self._closed = False
        self._packing = False
        self._last_heard = 0.0
        self._next_heartbeat = 0.0
        self._last_progress = 0.0
        self._resend_factor = 1.0

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()  # in the inbox, or the end
        self._settled = asyncio.Event()  # everything is acked, or the end
        self._room = asyncio.Event()  # for a control message, or the end
        self._link = Link(
            self._address,
            self._keys,
            self._make_hello,
            self._patience,
            self._jitter,
            self._receive,
            self._flush,
            self._fail,
        )
        try:
            self._link.open()
        except BaseException:
            self._link.close()
            self._link.terminate()
            raise
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._keeper = self._tasks.create_task(self._keep())
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
            self._link.close(LINGER_MS)
            self._wake_all(CapoError("the connection to the learner was closed"))
            await asyncio.to_thread(self._link.terminate)

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
        if not self._packing:  # what is delivered in this turn of the loop travels together
            self._packing = True
            self._loop.call_soon(self._pack)
        try:
            await parcel.packed
        except asyncio.CancelledError:
            self._outbox.withdraw(parcel)
            self._see_settled()
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
        self._link.leaving = self._link.leaving or isinstance(message, Goodbye)
        self._flush()

    @property
    def unacked_ends(self) -> tuple[str, ...]:
        """Ids of the episodes whose end was delivered but is not acked yet."""
        return self._outbox.unacked_ends

    @property
    def num_waiting(self) -> int:
        """Calls of `deliver` that do not fit into the window: earlier ones have to be acked."""
        return self._outbox.num_waiting

    @property
    def num_acked(self) -> int:
        """Deliveries that the learner committed."""
        return self._outbox.acked

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
            reason = self._link.trouble or self.paused or "it is connected but slow"
            raise PeerLostError(
                f"the learner at {self._address} did not ack {waiting} deliveries within "
                f"{timeout_s:.0f} s: {reason}"
            ) from None
        self._check()

    # -- the pulse ------------------------------------------------------------------------------

    async def _keep(self) -> None:
        before = self._loop.time()
        while self._failure is None:
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            stall_s = max(0.0, now - before - TICK_S)  # our own doing, not the learner's silence
            before = now
            try:
                self._tick(now, stall_s)
            except Exception as error:
                self._fail(error)

    def _tick(self, now: float, stall_s: float) -> None:
        self._last_heard += stall_s
        self._link.tick(now, stall_s)
        if self._welcome is not None and self._link.connected and not self._link.leaving:
            silent_s = now - self._last_heard
            if silent_s > self._welcome.dead_after_s:
                self._link.give_up(f"it said nothing for {silent_s:.0f} s")
                return
            if now >= self._next_heartbeat and not self._controls:
                self._next_heartbeat = now + self._welcome.heartbeat_s
                self._controls.append(encode(self._make_heartbeat()))
            self._resend_late(now)
        self._flush()

    def _resend_late(self, now: float) -> None:
        late_s = now - self._last_progress
        if not self._outbox.num_unacked or self.paused:
            self._last_progress = now
        elif late_s > self._resend_after_s * self._resend_factor:
            logger.info("no ack from %s for %.0f s: delivering again", self._address, late_s)
            self._last_progress = now
            self._resend_factor = min(2 * self._resend_factor, MAX_RESEND_FACTOR)
            self._outbox.rewind()

    def _flush(self) -> None:
        """Send what is due as far as the connection takes it."""
        while self._controls:
            if not self._link.send(self._controls[0]):
                return
            self._controls.popleft()
            self._room.set()
        while (frames := self._outbox.due()) is not None:
            if not self._link.send(frames):
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
            self._see_settled()
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
            self._link.forgotten()
        elif isinstance(message, Refused):
            raise RefusedError(
                f"the learner at {self._address} refused this actor: {message.reason}"
            )
        else:
            if isinstance(message, Welcome):
                self._on_welcome(message)
            if len(self._inbox) >= MAX_INBOX:
                raise CapoError(f"{MAX_INBOX} messages of the learner wait and nobody reads them")
            self._inbox.append(message)
            self._news.set()

    def _on_welcome(self, welcome: Welcome) -> None:
        if self._welcome is not None and self._welcome.run_id != welcome.run_id:
            raise RefusedError(
                f"the learner at {self._address} now works on run {welcome.run_id}, this actor on "
                f"{self._welcome.run_id}; start the actor anew"
            )
        self._welcome = welcome
        self._next_heartbeat = self._loop.time() + welcome.heartbeat_s
        self._set_paused("")
        self._link.welcomed()
        self._outbox.welcome(welcome)
        logger.info(
            "connected to %s at %s, run %s", welcome.learner_name, self._address, welcome.run_id
        )
        self._on_progress()

    def _on_progress(self) -> None:
        self._last_progress = self._loop.time()
        self._resend_factor = 1.0
        self._outbox.pack()
        self._see_settled()
        self._flush()

    def _see_settled(self) -> None:
        if self._outbox.empty:
            self._settled.set()

    def _set_paused(self, paused: str) -> None:
        if paused and not self.paused:
            logger.warning("the learner at %s pauses: %s", self._address, paused)
        self.paused = paused

    # -- the end --------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            if isinstance(error, CapoError):
                failure = error
            else:
                failure = CapoError(f"the actor's side of the wire broke: {error!r}")
                failure.__cause__ = error
            self._failure = failure
            self._wake_all(failure)
            self._link.close()

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
