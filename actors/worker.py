"""The core of an actor process: plays what it is granted, tells every step, takes new weights.

It needs only the learner's address; the rest comes with the Welcome. It outlives its learner: when
that is gone, episodes go on until the delivery window is full, and after the reconnect everything
unacked is delivered again. Every task belongs to one group; whatever ends the actor ends in `run`.
"""

import asyncio
import os
import socket
import time
import uuid
from collections.abc import Callable

from capo.actors.counts import Counts
from capo.actors.episodes import Episodes
from capo.actors.equipment import Equipment, StartEngine, equip
from capo.protocol.client import ActorClient
from capo.protocol.errors import CapoError, EngineError, PeerLostError, ProtocolError, first_of
from capo.protocol.keys import ActorKeys
from capo.protocol.messages import (
    PROTOCOL_VERSION,
    ActorHeartbeat,
    ActorSetup,
    Drain,
    Goodbye,
    Grant,
    GroupForm,
    GroupInvite,
    Hello,
    Ready,
    Revoke,
    ToActor,
    UpdateWeights,
    WeightsReport,
    Welcome,
)
from capo.protocol.records import Lease

UNLIMITED = 2**20  # as many episodes as the run's configuration says
FLUSH_TIMEOUT_S = 60.0
WATCH_S = 1.0


class Worker:
    """One per actor process; `run` once. `drain` may be called from a signal handler of the loop.

    `capacity` 0 leaves the number of episodes at once to the run's configuration. `progress` gets
    one line for people whenever what this actor waits for changes.
    """

    def __init__(
        self,
        start_engine: StartEngine,
        transports: tuple[str, ...],
        *,
        name: str = "",
        capacity: int = 0,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._start_engine = start_engine
        self._transports = transports
        self._name = name or f"{socket.gethostname()}-{os.getpid()}"
        self._actor_id = f"{self._name}-{uuid.uuid4().hex[:8]}"[-200:]
        self._capacity = capacity or UNLIMITED
        self._progress = progress
        self._run_id = ""
        self._equipment: Equipment | None = None
        self._setting_up: asyncio.Task[None] | None = None
        self._waiting_for = ""
        self._episodes = Episodes(self._play, self._on_ended)
        self._leaving = asyncio.Event()
        self._reason = ""
        self._failure: CapoError | None = None
        self._counts = Counts(time.monotonic())

    def drain(self, reason: str, *, abort: bool = False) -> None:
        """Play to the end what is being played (or drop it), deliver it, say goodbye, return."""
        if not self._leaving.is_set():
            self._reason = reason
            self._leaving.set()
        self._episodes.start_no_more()
        if abort:
            self._episodes.abort()

    async def run(
        self,
        address: str,
        keys: ActorKeys | None = None,
        patience_s: float = float("inf"),
        locate: Callable[[], str] | None = None,
    ) -> None:
        """Returns after a drain; raises a CapoError that says what ended this actor otherwise.

        `locate` is asked for the address before every new connection, where it may change.
        """
        self._wait_for(f"the learner at {address}")
        self._client = ActorClient(
            address,
            self._hello,
            keys,
            make_heartbeat=self._heartbeat,
            patience_s=patience_s,
            locate=locate,
        )
        try:
            async with self._client:
                await self._work()
        except* CapoError as group:
            raise first_of(group) from None
        finally:
            if self._equipment is not None:
                await self._equipment.engine.close()

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            listening = self._tasks.create_task(self._listen())
            watching = self._tasks.create_task(self._watch())
            await self._leaving.wait()
            self._wait_for(f"{self._episodes.num_playing} episodes to end ({self._reason})")
            await self._play_to_the_end()
            self._wait_for("the learner to commit what was delivered")
            try:
                await self._client.flush(FLUSH_TIMEOUT_S)
            except PeerLostError as error:
                self._progress(f"leaving without an ack: {error}")
            await self._client.send(Goodbye(reason=self._reason))
            listening.cancel()
            watching.cancel()
            if self._setting_up is not None:
                self._setting_up.cancel()
            if self._equipment is not None:
                self._equipment.duty.stop()
        if self._equipment is not None:
            await self._equipment.player.close()
        if self._failure is not None:
            raise self._failure

    async def _play_to_the_end(self) -> None:
        """Until no episode is in play. Those that only wait for a learner that commits nothing are
        dropped after FLUSH_TIMEOUT_S."""
        blocked_since, acked = time.monotonic(), -1
        while self._episodes.num_playing:
            await self._episodes.settle(WATCH_S)
            now = time.monotonic()
            if not self._client.num_waiting or self._client.num_acked != acked:
                blocked_since, acked = now, self._client.num_acked
            elif now - blocked_since > FLUSH_TIMEOUT_S:
                self._progress(
                    f"dropping {self._episodes.num_playing} episodes: the learner has committed "
                    f"nothing for {FLUSH_TIMEOUT_S:g} s"
                )
                self._episodes.abort()

    # -- messages -------------------------------------------------------------------------------

    async def _listen(self) -> None:
        async for message in self._client.messages():
            await self._handle(message)

    async def _handle(self, message: ToActor) -> None:
        if isinstance(message, Welcome):
            await self._on_welcome(message)
        elif isinstance(message, Grant):
            if not self._leaving.is_set():
                self._episodes.take(message.leases)
                self._start_episodes()
        elif isinstance(message, Revoke):
            self._episodes.revoke(message.episode_ids)
        elif isinstance(message, GroupInvite | GroupForm | UpdateWeights):
            if self._equipment is not None:
                await self._equipment.duty.handle(message)
        elif isinstance(message, Drain):
            self.drain(message.reason, abort=message.abort)

    async def _on_welcome(self, welcome: Welcome) -> None:
        self._run_id = welcome.run_id
        if self._equipment is not None:
            await self._client.send(Ready(weights_version=self._equipment.engine.version))
        elif self._setting_up is None:
            if welcome.setup is None:
                raise ProtocolError(
                    f"{welcome.learner_name} sent no setup to an actor that has none; "
                    "restart this actor"
                )
            self._setting_up = self._tasks.create_task(self._set_up(welcome.setup))

    async def _set_up(self, setup: ActorSetup) -> None:
        self._wait_for("the engine to start")
        self._equipment = await equip(
            setup, self._start_engine, self._client, self._counts, self._tasks, self._on_weights
        )
        await self._client.send(Ready(weights_version=self._equipment.engine.version))
        self._wait_for("weights")

    def _on_weights(self, report: WeightsReport) -> None:
        self._counts.broadcasts += 1
        self._counts.pause_s += report.pause_s
        self._check_engine()
        if not report.error:
            self._start_episodes()
        self._say_what_is_missing()

    # -- episodes -------------------------------------------------------------------------------

    def _start_episodes(self) -> None:
        if self._equipment is not None and self._equipment.engine.version >= 0:
            self._episodes.start(self._tasks, self._at_once())
            self._count_busy()
            self._say_what_is_missing()

    async def _play(self, lease: Lease) -> None:
        assert self._equipment is not None  # it is there before anything starts
        await self._equipment.player.play(lease, self._equipment.engine)
        self._check_engine()

    def _at_once(self) -> int:
        """How many episodes may be in play, as far as it is known."""
        if self._equipment is None:
            return self._capacity
        return min(self._capacity, self._equipment.concurrency)

    def _on_ended(self) -> None:
        self._count_busy()
        if not self._leaving.is_set():
            self._start_episodes()

    def _count_busy(self) -> None:
        self._counts.busy(time.monotonic(), self._episodes.num_playing > 0)

    # -- watching -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self._check_engine()

    def _check_engine(self) -> None:
        broken = "" if self._equipment is None else self._equipment.engine.broken
        if broken and self._failure is None:
            self._failure = EngineError(f"{self._name} stops: {broken}")
            self.drain(broken)

    def _say_what_is_missing(self) -> None:
        if self._equipment is None or self._leaving.is_set():
            return
        if self._episodes.num_playing:
            self._wait_for("")
        else:
            self._wait_for("weights" if self._equipment.engine.version < 0 else "leases")

    def _wait_for(self, what: str) -> None:
        if what != self._waiting_for:
            self._waiting_for = what
            self._progress(f"waiting for {what}" if what else "playing")

    def _blocked(self) -> str:
        """What stands in the way of episodes that are in play."""
        waiting = self._client.num_waiting
        return f"the learner to commit earlier steps, {waiting} calls wait" if waiting else ""

    def _hello(self) -> Hello:
        equipment = self._equipment
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            actor_id=self._actor_id,
            actor_name=self._name,
            run_id=self._run_id,
            tokenizer_digest=equipment.tokenizer_digest if equipment else "",
            capacity=self._at_once(),
            transports=self._transports,
            held_leases=self._held(),
            weights_version=equipment.engine.version if equipment else -1,
        )

    def _held(self) -> tuple[str, ...]:
        """Episodes that nobody else needs to play: pending, in play, or over but not acked yet."""
        return tuple(dict.fromkeys((*self._client.unacked_ends, *self._episodes.ids)))

    def _heartbeat(self) -> ActorHeartbeat:
        return ActorHeartbeat(
            running=self._episodes.num_playing,
            waiting_for="; ".join(filter(None, (self._waiting_for, self._blocked()))),
            ready=self._equipment is not None,
            held_leases=self._held(),
            metrics=self._counts.metrics(time.monotonic()),
        )
