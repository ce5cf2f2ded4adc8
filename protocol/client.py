"""The actor's end of the wire as its worker uses it: deliver records, send and read messages.

After every break it introduces itself again and delivers again what was not acked, forever; so the
learner may be killed and come back without anything lost. What goes over the connection, and when,
is decided in `conversation`.
"""

import asyncio
import functools
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

from capo.protocol.conversation import Conversation
from capo.protocol.errors import PeerLostError
from capo.protocol.keys import ActorKeys
from capo.protocol.link import Patience
from capo.protocol.messages import ActorHeartbeat, Delivery, Hello, ToActor, ToLearner
from capo.protocol.outbox import Parcel, size_of_records
from capo.protocol.records import EpisodeEnd, Step
from capo.protocol.validate import check_end, check_step

TICK_S = 0.1
LINGER_MS = 500


class ActorClient:
    """An async context manager, for one entry; everything is for the loop that entered it.

    `make_hello` is called for every introduction and says what the actor holds at that moment;
    `make_heartbeat` likewise. Without contact for `patience_s` it gives up with PeerLostError. What
    ends it is raised by every later call. `locate` is asked for the address before every
    new connection, for a learner that may come back elsewhere; without it the address stays.
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
        locate: Callable[[], str] | None = None,
    ) -> None:
        self._address = address
        patience = Patience(hello_s=hello_timeout_s, log_s=log_after_s, total_s=patience_s)
        self._begin = functools.partial(
            Conversation,
            locate=locate or (lambda: address),
            make_hello=make_hello,
            keys=keys,
            make_heartbeat=make_heartbeat,
            resend_after_s=resend_after_s,
            patience=patience,
            jitter=jitter,
        )

    async def __aenter__(self) -> Self:
        self._talk = self._begin()  # it belongs to the running loop
        try:
            self._talk.open()
        except BaseException:
            self._talk.close()
            self._talk.terminate()
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
        self._keeper.cancel()
        self._talk.close(LINGER_MS)
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            await asyncio.to_thread(self._talk.terminate)

    @property
    def policy_version(self) -> int:
        """The learner's, by its last heartbeat."""
        return self._talk.policy_version

    @property
    def paused(self) -> str:
        """Why the learner grants or commits nothing, as it says; "" while it does."""
        return self._talk.paused

    @property
    def unacked_ends(self) -> tuple[str, ...]:
        """Ids of the episodes whose end was delivered but is not acked yet."""
        return self._talk.outbox.unacked_ends

    @property
    def num_waiting(self) -> int:
        """Calls of `deliver` that do not fit into the window: earlier ones have to be acked."""
        return self._talk.outbox.num_waiting

    @property
    def num_acked(self) -> int:
        """Deliveries that the learner committed."""
        return self._talk.outbox.acked

    async def messages(self) -> AsyncIterator[ToActor]:
        """All that the learner says except Ack, LearnerHeartbeat and Reintroduce, until the end.

        A Welcome comes after every (re)connect: what was given to `send` before it may be lost, so
        repeat what still holds (Ready). Raises RefusedError when the learner refuses this actor.
        """
        talk = self._talk
        while True:
            while talk.inbox:
                yield talk.inbox.popleft()
            if talk.closed:
                return
            talk.check()
            talk.news.clear()
            await talk.news.wait()

    async def deliver(self, steps: Sequence[Step] = (), ends: Sequence[EpisodeEnd] = ()) -> None:
        """Hand over records that stay together, in order; returns when the window took them.

        From then on they are delivered again until acked; cancelled before that, nothing is.
        Raises ProtocolError for a record the learner would refuse.
        """
        self._talk.check()
        if not steps and not ends:
            return
        for step in steps:
            check_step(step)
        for end in ends:
            check_end(end)
        packed = asyncio.get_running_loop().create_future()
        parcel = Parcel(tuple(steps), tuple(ends), size_of_records(steps, ends), packed)
        self._talk.put(parcel)
        try:
            await packed
        except asyncio.CancelledError:
            self._talk.withdraw(parcel)
            raise

    async def send(self, message: ToLearner) -> None:
        """Send a control message; it waits here while there is no connection."""
        talk = self._talk
        talk.check()
        if isinstance(message, Hello | Delivery):
            raise ValueError(f"{type(message).__name__} is sent by the client itself")
        while talk.crowded:
            talk.room.clear()
            await talk.room.wait()
            talk.check()
        talk.say(message)

    async def flush(self, timeout_s: float) -> None:
        """Return when everything delivered is acked; raises PeerLostError after `timeout_s`."""
        talk = self._talk
        try:
            async with asyncio.timeout(timeout_s):
                while not talk.outbox.empty:
                    talk.check()
                    talk.settled.clear()
                    await talk.settled.wait()
        except TimeoutError:
            waiting = talk.outbox.num_unacked + talk.outbox.num_waiting
            raise PeerLostError(
                f"the learner at {self._address} did not ack {waiting} deliveries within "
                f"{timeout_s:.0f} s: {talk.trouble}"
            ) from None
        talk.check()

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        before = loop.time()
        while self._talk.failure is None:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            stall_s = max(0.0, now - before - TICK_S)  # our own doing, not the learner's silence
            before = now
            try:
                self._talk.tick(now, stall_s)
            except Exception as error:  # it ends the conversation, not this task's group
                self._talk.fail(error)
