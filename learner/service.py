"""The learner as actors see it: joins the wire, the scheduler, the run file and the weight groups.

Its methods run in the server's threads, those under "From the main thread" in the main one; one
lock guards what both read. Knows no tensors.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from capo.configs.schema import NetworkConfig, RolloutConfig
from capo.learner.run_file import RunFile
from capo.learner.run_ingest import EpisodeLimits
from capo.learner.scheduler import Scheduler
from capo.learner.status_file import ActorStatus, LearnerStatus, write_status
from capo.learner.weights import BroadcastReport, WeightBroadcaster
from capo.protocol.errors import PeerLostError, StorageFullError
from capo.protocol.frames import MIB, Limits
from capo.protocol.keys import load_learner_keys
from capo.protocol.messages import (
    ActorHeartbeat,
    ActorSetup,
    Delivery,
    Drain,
    Grant,
    GroupAccept,
    GroupFormed,
    Hello,
    Ready,
    Refused,
    Revoke,
    ToLearner,
    WeightsReport,
    Welcome,
)
from capo.protocol.server import Server

logger = logging.getLogger(__name__)

RETURN_GRACE = 4.0  # an actor from before a restart has so many `dead_after_s` to come back
STATUS_EVERY_S = 1.0
REPEAT_DRAIN_S = 2.0
RECONNECTED = "it reconnected"
RETRY_WEIGHTS_S = 30.0  # before an actor that missed a broadcast is invited again


class Actor(Struct):
    """What the learner knows of one connected actor."""

    name: str
    capacity: int
    transports: tuple[str, ...]
    weights_version: int
    ready: bool
    playing: set[str]
    connected_at: float
    invite_after: float = 0.0
    missing: dict[str, float] = {}  # what it plays by our book but not by its own, since when
    heard_at: float = 0.0
    heartbeat: ActorHeartbeat = ActorHeartbeat()


class Service:
    """Implements the server's Handler. `start` binds; `close` commits what came in and stops."""

    def __init__(
        self,
        *,
        run_id: str,
        name: str,
        run_dir: Path,
        setup: ActorSetup,
        network: NetworkConfig,
        run_file: RunFile,
        scheduler: Scheduler,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`note` gets one sentence for every actor that comes, goes or is refused."""
        self._run_id = run_id
        self._name = name
        self._run_dir = run_dir
        self._setup = setup
        self._limits = EpisodeLimits(
            vocabulary_size=msgspec.json.decode(setup.model_config)["vocab_size"],
            max_length=setup.max_length,
        )
        self._max_capacity = msgspec.json.decode(setup.rollout, type=RolloutConfig).concurrency
        self._network = network
        self._run_file = run_file
        self._scheduler = scheduler
        self._note = note
        self._clock = clock
        self._lock = threading.RLock()
        self._actors: dict[str, Actor] = {}
        self._unnamed: dict[str, str] = {}  # actors that are not in the run file yet
        self._broadcaster: WeightBroadcaster | None = None
        self._draining = False
        self._returning = run_file.actors_before()  # not seen since this learner began
        self._return_until = clock() + network.dead_after_s
        self._doing = ("starting", clock())
        self._status_at = clock()
        deadline = clock() + RETURN_GRACE * network.dead_after_s
        self._expected = dict.fromkeys(scheduler.holders(), deadline)
        self._server = Server(
            network.bind,
            self,
            keys=load_learner_keys(Path(network.key_file)) if network.key_file else None,
            insecure=network.insecure,
            limits=Limits(max_message_bytes=network.max_message_mib * MIB),
        )

    # The server's Handler

    def hello(self, hello: Hello) -> Welcome | Refused:
        if hello.run_id not in ("", self._run_id):
            return self._refused(
                hello,
                f"this learner serves run {self._run_id}, not {hello.run_id}; start a new actor.",
            )
        if hello.tokenizer_digest not in ("", self._setup.tokenizer_digest):
            return self._refused(
                hello,
                f"tokenizer {hello.tokenizer_digest[:12]} is not the run's "
                f"{self._setup.tokenizer_digest[:12]}; start the actor without a tokenizer of its "
                "own.",
            )
        with self._lock:
            self._unnamed[hello.actor_id] = hello.actor_name
        self._name_actors()
        playing = self._scheduler.actor_back(hello.actor_id, hello.held_leases)
        with self._lock:
            broadcaster = self._broadcaster if hello.actor_id in self._actors else None
            self._expected.pop(hello.actor_id, None)
            self._returning.discard(hello.actor_id)
            returning = hello.actor_id in self._actors or hello.run_id != ""
            self._actors[hello.actor_id] = Actor(
                name=hello.actor_name,
                capacity=min(hello.capacity, self._max_capacity),
                transports=hello.transports,
                weights_version=hello.weights_version,
                ready=hello.weights_version >= 0,
                playing=playing,
                connected_at=self._clock(),
                heard_at=self._clock(),
            )
        if broadcaster is not None:  # what a broadcast sent to the old connection is lost
            broadcaster.lost(hello.actor_id, RECONNECTED)
        self._note(f"{hello.actor_name} {'is back' if returning else 'joined'}.")
        known = hello.run_id == self._run_id and hello.tokenizer_digest != ""
        return Welcome(
            run_id=self._run_id,
            learner_name=self._name,
            last_sequence=self._run_file.last_sequence(hello.actor_id),
            window=self._network.window,
            heartbeat_s=self._network.heartbeat_s,
            dead_after_s=self._network.dead_after_s,
            setup=None if known else self._setup,
        )

    def _name_actors(self) -> None:
        """Names are for people; a full disk puts them off."""
        with self._lock:
            unnamed = dict(self._unnamed)
        for actor_id, name in unnamed.items():
            try:
                self._run_file.actor_seen(actor_id, name)
            except StorageFullError:
                return
            with self._lock:
                self._unnamed.pop(actor_id, None)

    def _refused(self, hello: Hello, reason: str) -> Refused:
        self._note(f"{hello.actor_name} was refused: {reason}")
        return Refused(reason=reason)

    def commit(self, deliveries: Sequence[tuple[str, Delivery]]) -> None:
        committed = self._run_file.commit(deliveries, self._limits)
        if committed.num_refused:
            logger.warning("%d records were refused: %s", committed.num_refused, committed.fault)
        for ended in committed.ended:
            self._scheduler.episode_ended(ended)
        with self._lock:
            for ended in committed.ended:
                actor = self._actors.get(ended.actor_id)
                if actor is not None:
                    actor.playing.discard(ended.episode_id)
        if committed.ended:
            self.deal()

    def control(self, actor_id: str, message: ToLearner) -> None:
        with self._lock:
            actor = self._actors.get(actor_id)
            broadcaster = self._broadcaster
        if isinstance(message, GroupAccept | GroupFormed | WeightsReport):
            if broadcaster is not None:
                broadcaster.receive(actor_id, message)
        elif actor is not None and isinstance(message, Ready):
            actor.weights_version = message.weights_version
            actor.ready = True
        elif actor is not None and isinstance(message, ActorHeartbeat):
            actor.heartbeat = message
            actor.heard_at = self._clock()
            actor.ready = actor.ready or message.ready
            self._compare_leases(actor_id, actor, message)

    def _compare_leases(self, actor_id: str, actor: Actor, heartbeat: ActorHeartbeat) -> None:
        """Give to others what an actor has not heard of for longer than any message travels."""
        if heartbeat.held_leases is None:
            return
        now = self._clock()
        with self._lock:
            absent = actor.playing.difference(heartbeat.held_leases)
            actor.missing = {one: actor.missing.get(one, now) for one in absent}
            overdue = [
                episode_id
                for episode_id, since in actor.missing.items()
                if now - since > self._network.dead_after_s
            ]
            actor.playing.difference_update(overdue)
        if overdue:
            self._scheduler.not_received(actor_id, overdue)

    def lost(self, actor_id: str, reason: str) -> None:
        with self._lock:
            actor = self._actors.pop(actor_id, None)
            broadcaster = self._broadcaster
        self._scheduler.actor_lost(actor_id)
        if broadcaster is not None:
            broadcaster.lost(actor_id, reason)
        if actor is not None:
            self._note(f"{actor.name} is gone: {reason}.")

    def tick(self) -> None:
        now = self._clock()
        with self._lock:
            overdue = [actor_id for actor_id, limit in self._expected.items() if now > limit]
            for actor_id in overdue:
                del self._expected[actor_id]
        for actor_id in overdue:
            self._scheduler.actor_lost(actor_id)
        for revoked in self._scheduler.take_revocations():
            with self._lock:
                actor = self._actors.get(revoked.actor_id)
                if actor is not None:
                    actor.playing.discard(revoked.episode_id)
            revoke = Revoke(episode_ids=(revoked.episode_id,), reason=revoked.reason)
            self._server.send(revoked.actor_id, revoke)
        self.deal()
        if now >= self._status_at:
            self._status_at = now + STATUS_EVERY_S
            self._name_actors()
            write_status(self._run_dir, self.status())

    def deal(self) -> None:
        """Hand out what may be played to whoever has weights and room. From any thread."""
        with self._lock:
            if self._draining:
                return
            lowest, highest = self._scheduler.useful_weights()
            free = {
                actor_id: actor.capacity - len(actor.playing)
                for actor_id, actor in self._actors.items()
                if actor.ready and max(lowest, 0) <= actor.weights_version <= highest
            }
            if not any(slots > 0 for slots in free.values()):
                return
            try:
                dealt = self._scheduler.deal(free)
            except StorageFullError as error:
                logger.warning("no leases are handed out: %s", error)
                return
            for actor_id, leases in dealt.items():
                self._actors[actor_id].playing.update(lease.episode_id for lease in leases)
                self._server.send(actor_id, Grant(leases=tuple(leases)))

    # From the main thread

    def start(self) -> str:
        """Bind and serve; returns the address really bound."""
        return self._server.start()

    @property
    def send(self) -> Callable[[str, object], None]:
        return self._server.send  # type: ignore[return-value]

    def attach(self, broadcaster: WeightBroadcaster) -> None:
        """From now on the messages of weight groups go to `broadcaster`."""
        with self._lock:
            self._broadcaster = broadcaster

    def check(self) -> None:
        """Raise what the server failed with, if it did."""
        if self._server.failure is not None:
            raise self._server.failure

    @property
    def storage_trouble(self) -> str:
        """Why deliveries are not committed at present, "" if they are."""
        return self._server.storage_trouble

    def ready_actors(self, without_version: int | None = None) -> list[str]:
        """Actors whose engine is up; only those whose weights are not of that version, if given."""
        now = self._clock()
        with self._lock:
            return [
                actor_id
                for actor_id, actor in self._actors.items()
                if actor.ready
                and now >= actor.invite_after
                and actor.weights_version != without_version
            ]

    def weights_arrived(self, report: BroadcastReport) -> None:
        """Remember who has which weights; say who was dropped and why. Dropped actors get no work
        until a later broadcast reaches them."""
        with self._lock:
            for member in report.updated:
                actor = self._actors.get(member.actor_id)
                if actor is not None:
                    actor.weights_version = report.version
            for actor_id, reason in report.dropped.items():
                actor = self._actors.get(actor_id)
                name = actor.name if actor is not None else actor_id
                self._note(f"{name} did not get the weights of version {report.version}: {reason}.")
                if actor is not None:
                    actor.weights_version = -1
                    pause_s = 0.0 if reason == RECONNECTED else RETRY_WEIGHTS_S
                    actor.invite_after = self._clock() + pause_s

    def doing(self, what: str) -> None:
        """What the main thread does from now on, for `capo status`."""
        if what != self._doing[0]:
            self._doing = (what, self._clock())

    def status(self) -> LearnerStatus:
        what, since = self._doing
        with self._lock:
            broadcaster = self._broadcaster
        return LearnerStatus(
            written_at=time.time(),
            pid=os.getpid(),
            doing=what,
            doing_s=self._clock() - since,
            scheduler=self._scheduler.status(),
            actors=tuple(self.actors()),
            waits=tuple(broadcaster.waits()) if broadcaster is not None else (),
        )

    def announce(self, version: int, paused: str = "") -> None:
        self._server.announce(version, paused)

    def actors(self) -> list[ActorStatus]:
        now = self._clock()
        with self._lock:
            return [
                ActorStatus(
                    actor_id=actor_id,
                    name=actor.name,
                    ready=actor.ready,
                    weights_version=actor.weights_version,
                    playing=len(actor.playing),
                    capacity=actor.capacity,
                    waiting_for=actor.heartbeat.waiting_for,
                    silent_s=now - actor.heard_at,
                    connected_s=now - actor.connected_at,
                    metrics=actor.heartbeat.metrics,
                )
                for actor_id, actor in self._actors.items()
            ]

    def drain(self, reason: str, timeout_s: float, *, abort: bool) -> None:
        """Send every actor home and wait until they are gone. A learner that resumed a moment ago
        also waits a little for those of before, which would look for it in vain.

        Raises:
            PeerLostError: names those that did not leave in time.
        """
        self._draining = True
        if self._server.failure is not None:  # nobody can be told any more
            return
        deadline = self._clock() + timeout_s
        told_at: dict[str, float] = {}
        while True:
            with self._lock:
                left = {actor_id: actor.name for actor_id, actor in self._actors.items()}
            returning = self._returning and self._clock() < self._return_until
            if not left and not returning:
                return
            if left and self._clock() > deadline:
                names = ", ".join(left.values())
                raise PeerLostError(f"{names} did not leave within {timeout_s:.0f} s.")
            for actor_id in left:  # again for who reconnected, or missed it
                if self._clock() - told_at.get(actor_id, -math.inf) > REPEAT_DRAIN_S:
                    told_at[actor_id] = self._clock()
                    self._server.send(actor_id, Drain(reason=reason, abort=abort))
            time.sleep(0.02)

    def close(self) -> None:
        self._server.close()
