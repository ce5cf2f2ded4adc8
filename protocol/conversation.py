"""What an actor and its learner say to each other, and when: heartbeats, deliveries, acks, breaks.

Runs on the actor's event loop, whose owner calls `tick`; awaits nothing and owns no task. Three
events say that something changed, and all are set at the end. What records and messages mean is the
worker's business.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from capo.protocol.errors import CapoError, RefusedError
from capo.protocol.frames import Frame, FrameDecoder, Limits, encode
from capo.protocol.keys import ActorKeys
from capo.protocol.link import SETUP_LIMITS, Link, Patience
from capo.protocol.messages import (
    Ack,
    ActorHeartbeat,
    Goodbye,
    Hello,
    LearnerHeartbeat,
    Refused,
    Reintroduce,
    ToActor,
    ToLearner,
    Welcome,
)
from capo.protocol.outbox import Outbox, Parcel
from capo.protocol.sockets import Parts

MAX_RESEND_FACTOR = 8.0
MAX_CONTROLS = 256  # control messages that wait for the connection
MAX_INBOX = 4096  # messages that wait for the worker

CLOSED = "the connection to the learner was closed"

logger = logging.getLogger(__name__)


class _Contact(Struct):
    """What the conversation goes by since the last Welcome; times are the loop's."""

    welcome: Welcome
    last_heard: float
    next_heartbeat: float
    last_progress: float  # an ack, or there was nothing to be acked
    resend_factor: float = 1.0


class Conversation:
    """With one learner, over any number of connections, until `close` or the first error.

    `failure` is that error. `inbox` holds what the learner said to the worker.
    """

    def __init__(
        self,
        *,
        locate: Callable[[], str],
        make_hello: Callable[[], Hello],
        keys: ActorKeys | None,
        make_heartbeat: Callable[[], ActorHeartbeat],
        resend_after_s: float,
        patience: Patience,
        jitter: Callable[[], float],
    ) -> None:
        self.paused = ""  # why the learner grants or commits nothing, as it says
        self.policy_version = 0  # the learner's, by its last heartbeat
        self.outbox = Outbox(Limits())
        self.inbox: deque[ToActor] = deque()
        self.failure: CapoError | None = None
        self.closed = False
        self.news = asyncio.Event()  # something is in the inbox, or it ended
        self.settled = asyncio.Event()  # everything is acked, or it ended
        self.room = asyncio.Event()  # for a control message, or it ended
        self._make_heartbeat = make_heartbeat
        self._resend_after_s = resend_after_s
        self._loop = asyncio.get_running_loop()
        self._decoder: FrameDecoder[ToActor] = FrameDecoder(ToActor, SETUP_LIMITS)
        self._controls: deque[list[Frame]] = deque()
        self._contact: _Contact | None = None
        self._packing = False
        self._link = Link(
            locate=locate,
            keys=keys,
            make_hello=make_hello,
            patience=patience,
            jitter=jitter,
            on_message=self._receive,
            on_ready=self._flush,
            on_failure=self.fail,
        )

    def open(self) -> None:
        """Connect in the background; raises CapoError for an address that cannot be one."""
        self._link.open()

    # -- outgoing -------------------------------------------------------------------------------

    @property
    def crowded(self) -> bool:
        """Whether so many control messages wait that no other may be said."""
        return len(self._controls) >= MAX_CONTROLS

    @property
    def trouble(self) -> str:
        """Why deliveries are not acked, as far as it is known here."""
        return self._link.trouble or self.paused or "it is connected but slow"

    def say(self, message: ToLearner) -> None:
        """Send a control message once connected. After Goodbye it does not connect again."""
        self._controls.append(encode(message))
        self._link.leaving = self._link.leaving or isinstance(message, Goodbye)
        self._flush()

    def put(self, parcel: Parcel) -> None:
        """Deliver `parcel` together with whatever else comes in this turn of the loop."""
        self.outbox.put(parcel)
        if not self._packing:
            self._packing = True
            self._loop.call_soon(self._pack)

    def withdraw(self, parcel: Parcel) -> None:
        """Do not deliver `parcel` after all, unless it has a sequence number already."""
        self.outbox.withdraw(parcel)
        self._see_settled()

    def tick(self, now: float, stall_s: float) -> None:
        """Do what is due; raises PeerLostError when patience is over. The loop stood still for
        `stall_s`, which does not count as the learner's silence."""
        contact = self._contact
        if contact is not None:
            contact.last_heard += stall_s
        self._link.tick(now, stall_s)
        if contact is not None and self._link.connected and not self._link.leaving:
            silent_s = now - contact.last_heard
            if silent_s > contact.welcome.dead_after_s:
                self._link.give_up(f"it said nothing for {silent_s:.0f} s")
                return
            if now >= contact.next_heartbeat and not self._controls:
                contact.next_heartbeat = now + contact.welcome.heartbeat_s
                self._controls.append(encode(self._make_heartbeat()))
            self._resend_late(contact, now)
        self._flush()

    def _resend_late(self, contact: _Contact, now: float) -> None:
        late_s = now - contact.last_progress
        if not self.outbox.num_unacked or self.paused:
            contact.last_progress = now
        elif late_s > self._resend_after_s * contact.resend_factor:
            logger.info("no ack from %s for %.0f s: delivering again", self._link.address, late_s)
            contact.last_progress = now
            contact.resend_factor = min(2 * contact.resend_factor, MAX_RESEND_FACTOR)
            self.outbox.rewind()

    def _flush(self) -> None:
        """Send what is due as far as the connection takes it."""
        while self._controls:
            if not self._link.send(self._controls[0]):
                return
            self._controls.popleft()
            self.room.set()
        while (frames := self.outbox.due()) is not None:
            if not self._link.send(frames):
                return
            self.outbox.sent()

    def _pack(self) -> None:
        self._packing = False
        if self.failure is not None or self.closed:
            return
        if self._contact is not None and not self.outbox.num_unacked:
            self._contact.last_progress = self._loop.time()
        try:
            self.outbox.pack()
            self._see_settled()
            self._flush()
        except Exception as error:  # a callback of the loop has no caller to raise it to
            self.fail(error)

    # -- incoming -------------------------------------------------------------------------------

    def _receive(self, parts: Parts) -> None:
        message = self._decoder.decode(parts)
        now = self._loop.time()
        if self._contact is not None:
            self._contact.last_heard = now
        if isinstance(message, Ack):
            if self.outbox.ack(message.sequence) and self._contact is not None:
                self._contact.last_progress = now
                self._contact.resend_factor = 1.0
                self._go_on()
        elif isinstance(message, LearnerHeartbeat):
            self.policy_version = message.policy_version
            self._set_paused(message.paused)
        elif isinstance(message, Reintroduce):
            self._link.forgotten()
        elif isinstance(message, Refused):
            raise RefusedError(
                f"the learner at {self._link.address} refused this actor: {message.reason}"
            )
        else:
            if isinstance(message, Welcome):
                self._on_welcome(message, now)
            if len(self.inbox) >= MAX_INBOX:
                raise CapoError(f"{MAX_INBOX} messages of the learner wait and nobody reads them")
            self.inbox.append(message)
            self.news.set()

    def _on_welcome(self, welcome: Welcome, now: float) -> None:
        if self._contact is not None and self._contact.welcome.run_id != welcome.run_id:
            raise RefusedError(
                f"the learner at {self._link.address} now works on run {welcome.run_id}, this "
                f"actor on {self._contact.welcome.run_id}; restart this actor"
            )
        self._contact = _Contact(
            welcome=welcome,
            last_heard=now,
            next_heartbeat=now + welcome.heartbeat_s,
            last_progress=now,
        )
        self._set_paused("")
        self._link.welcomed()
        self.outbox.welcome(welcome)
        logger.info(
            "connected to %s at %s, run %s",
            welcome.learner_name,
            self._link.address,
            welcome.run_id,
        )
        self._go_on()

    def _go_on(self) -> None:
        """There may be room in the window."""
        self.outbox.pack()
        self._see_settled()
        self._flush()

    def _see_settled(self) -> None:
        if self.outbox.empty:
            self.settled.set()

    def _set_paused(self, paused: str) -> None:
        if paused and not self.paused:
            logger.warning("the learner at %s pauses: %s", self._link.address, paused)
        self.paused = paused

    # -- the end --------------------------------------------------------------------------------

    def close(self, linger_ms: int = 0) -> None:
        """Say nothing more; what was sent has `linger_ms` to leave. Then call `terminate`."""
        self.closed = True
        self._link.close(linger_ms)
        self._wake_all(CapoError(CLOSED))

    def terminate(self) -> None:
        """Free libzmq's threads after `close`; may block until what lingers has left."""
        self._link.terminate()

    def check(self) -> None:
        """Raise what ended the conversation, if it has ended."""
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise CapoError(CLOSED)

    def fail(self, error: Exception) -> None:
        """End the conversation with `error`, unless it has failed already."""
        if self.failure is None:
            if isinstance(error, CapoError):
                failure = error
            else:
                failure = CapoError(f"the actor's side of the wire broke: {error!r}")
                failure.__cause__ = error
            self.failure = failure
            self._wake_all(failure)
            self._link.close()

    def _wake_all(self, error: CapoError) -> None:
        self.outbox.fail(error)
        self.news.set()
        self.settled.set()
        self.room.set()
