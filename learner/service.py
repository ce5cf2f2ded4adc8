"""The learner as actors see it: joins the wire, the scheduler, the run file and the weight groups.

Its methods run in the server's threads, those under "From the main thread" in the main one; one
lock guards what both read. Knows no tensors.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from capo.configs.schema import NetworkConfig, RolloutConfig
from capo.learner.actor_book import RECONNECTED, ActorBook, refusal
from capo.learner.actor_names import ActorNames
from capo.learner.drain import send_home
from capo.learner.run_endings import EpisodeLimits
from capo.learner.run_file import RunFile
from capo.learner.scheduler import Scheduler
from capo.learner.scheduler_status import Wait
from capo.learner.status_file import ActorStatus, LearnerStatus
from capo.learner.status_teller import StatusTeller
from capo.learner.weights import BroadcastReport, WeightBroadcaster
from capo.protocol.errors import StorageFullError
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
    ToActor,
    ToLearner,
    WeightsReport,
    Welcome,
)
from capo.protocol.sayings import Seldom, plain
from capo.protocol.server import Server

logger = logging.getLogger(__name__)

SLOW_COMMIT_S = 1.0  # beyond it somebody may want to look at the disk


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
        self._setup = setup
        self._limits = EpisodeLimits(
            vocabulary_size=msgspec.json.decode(setup.model_config)["vocab_size"],
            max_length=setup.max_length,
        )
        self._network = network
        self._run_file = run_file
        self._scheduler = scheduler
        self._note = Seldom(note, burst=256)
        self._warn = Seldom(logger.warning)
        self._clock = clock
        self._lock = threading.RLock()
        self._book = ActorBook(
            max_capacity=msgspec.json.decode(setup.rollout, type=RolloutConfig).concurrency,
            dead_after_s=network.dead_after_s,
            holders=scheduler.holders(),
            before=run_file.actors_before(),
            now=clock(),
        )
        self._names = ActorNames(run_file)
        self._broadcaster: WeightBroadcaster | None = None
        self._draining = False
        self._doing = ("starting", clock())
        self._teller = StatusTeller(run_dir, self.status, clock)
        self._server = Server(
            network.bind,
            self,
            keys=load_learner_keys(Path(network.key_file)) if network.key_file else None,
            insecure=network.insecure,
            limits=Limits(max_message_bytes=network.max_message_mib * MIB),
        )

    # The server's Handler

    def hello(self, hello: Hello) -> Welcome | Refused:
        if reason := refusal(hello, self._run_id, self._setup.tokenizer_digest):
            self._note(f"{hello.actor_name} was refused: {reason}")
            return Refused(reason=reason)
        self._names.add(hello.actor_id, hello.actor_name)
        playing = self._scheduler.actor_back(hello.actor_id, hello.held_leases)
        with self._lock:
            was_connected = self._book.join(hello, playing, self._clock())
            broadcaster = self._broadcaster
        if was_connected and broadcaster is not None:  # what it sent to the old connection is lost
            broadcaster.lost(hello.actor_id, RECONNECTED)
        returning = was_connected or hello.run_id != ""
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

    def commit(self, deliveries: Sequence[tuple[str, Delivery]]) -> None:
        committed = self._run_file.commit(deliveries, self._limits)
        if committed.num_refused:
            self._warn(f"{committed.num_refused} records were refused: {plain(committed.fault)}")
        for ended in committed.ended:
            self._scheduler.episode_ended(ended)
        with self._lock:
            for ended in committed.ended:
                self._book.no_longer_plays(ended.actor_id, ended.episode_id)
        if committed.ended:
            self.deal()

    def control(self, actor_id: str, message: ToLearner) -> None:
        if isinstance(message, GroupAccept | GroupFormed | WeightsReport):
            with self._lock:
                broadcaster = self._broadcaster
            if broadcaster is not None:
                broadcaster.receive(actor_id, message)
        elif isinstance(message, Ready):
            with self._lock:
                self._book.engine_up(actor_id, message.weights_version)
        elif isinstance(message, ActorHeartbeat):
            with self._lock:
                overdue = self._book.heard(actor_id, message, self._clock())
            if overdue:
                self._scheduler.not_received(actor_id, overdue)

    def report(self) -> bytes:
        return self._teller.answer()

    def lost(self, actor_id: str, reason: str) -> None:
        with self._lock:
            actor = self._book.leave(actor_id)
            broadcaster = self._broadcaster
        self._scheduler.actor_lost(actor_id)
        if broadcaster is not None:
            broadcaster.lost(actor_id, reason)
        if actor is not None:
            self._note(f"{actor.name} is gone: {reason}.")

    def tick(self) -> None:
        with self._lock:
            overdue = self._book.take_overdue(self._clock())
        for actor_id in overdue:
            self._scheduler.actor_lost(actor_id)
        for revoked in self._scheduler.take_revocations():
            with self._lock:
                self._book.no_longer_plays(revoked.actor_id, revoked.episode_id)
            revoke = Revoke(episode_ids=(revoked.episode_id,), reason=revoked.reason)
            self._server.send(revoked.actor_id, revoke)
        self.deal()
        if self._teller.write_if_due():
            self._note.due()
            self._warn.due()
            self._names.store()

    def deal(self) -> None:
        """Hand out what may be played to the actors that have weights and room. From any thread."""
        with self._lock:
            if self._draining:
                return
            free = self._book.free_slots(*self._scheduler.useful_weights())
            if not any(slots > 0 for slots in free.values()):
                return
            try:
                dealt = self._scheduler.deal(free)
            except StorageFullError as error:
                self._warn(f"no leases are handed out: {error}")
                return
            for actor_id, leases in dealt.items():
                self._book.granted(actor_id, [lease.episode_id for lease in leases])
                self._server.send(actor_id, Grant(leases=tuple(leases)))

    # From the main thread

    def start(self) -> str:
        """Bind and serve; returns the address really bound."""
        return self._server.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The server's, after `start`."""
        return self._server.loop

    def send(self, actor_id: str, message: ToActor) -> None:
        """Nothing is sent to an actor that is not connected. From any thread."""
        self._server.send(actor_id, message)

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
        with self._lock:
            return self._book.invitable(without_version, self._clock())

    def weights_arrived(self, report: BroadcastReport) -> None:
        """Remember who has which weights; say who was dropped and why. Dropped actors get no work
        until a later broadcast reaches them."""
        with self._lock:
            self._book.weights_arrived(report, self._clock())
            for actor_id, reason in report.dropped.items():
                name = self._book.name_of(actor_id)
                self._note(f"{name} did not get the weights of version {report.version}: {reason}.")

    def doing(self, what: str) -> None:
        """What the main thread does from now on, for `capo status`."""
        if what != self._doing[0]:
            self._doing = (what, self._clock())

    def status(self) -> LearnerStatus:
        what, since = self._doing
        with self._lock:
            broadcaster = self._broadcaster
        waits = list(broadcaster.waits()) if broadcaster is not None else []
        if (commit_s := self._server.commit_s) > SLOW_COMMIT_S:
            disk = f"the disk of {self._run_file.path}"
            waits.append(Wait(who="the commit of deliveries", whom=disk, since_s=commit_s))
        return LearnerStatus(
            written_at=time.time(),
            pid=os.getpid(),
            doing=what,
            doing_s=self._clock() - since,
            scheduler=self._scheduler.status(),
            actors=self.actors(),
            waits=tuple(waits),
        )

    def announce(self, version: int, paused: str = "") -> None:
        self._server.announce(version, paused)

    def actors(self) -> tuple[ActorStatus, ...]:
        with self._lock:
            return self._book.statuses(self._clock())

    def drain(self, reason: str, timeout_s: float, *, abort: bool) -> None:
        """Send every actor home and wait until they are gone. A learner that resumed a moment ago
        also waits a little for those of before, which could not find it later.

        Raises:
            PeerLostError: names those that did not leave in time.
        """
        self._draining = True
        if self._server.failure is not None:  # nobody can be told any more
            return
        order = Drain(reason=reason, abort=abort)
        send_home(self._left, lambda one: self._server.send(one, order), timeout_s, self._clock)

    def _left(self) -> tuple[dict[str, str], bool]:
        with self._lock:
            return self._book.names(), self._book.may_return(self._clock())

    def close(self) -> None:
        self._server.close()
