"""The learner of a simulated fleet, in a process of its own: everything but the training.

"run file" is the real service: server, scheduler, leases, run file, and a thread that takes batches
as an update would. "nothing" is the wire alone: the server before a handler that grants and counts.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from benchmarks._fleet_load import VOCABULARY
from capo.configs.schema import NetworkConfig, RolloutConfig
from capo.learner.run_endings import EpisodeLimits
from capo.learner.run_file import NO_LIMITS, RunFile
from capo.learner.run_ingest import Committed
from capo.learner.scheduler import Scheduler
from capo.learner.scheduler_rules import SchedulerRules
from capo.learner.service import Service
from capo.protocol.errors import StorageFullError
from capo.protocol.handler import ServerStats
from capo.protocol.messages import ActorSetup, Delivery, Grant, Hello, ToLearner, Welcome
from capo.protocol.records import Lease, Purpose, Task
from capo.protocol.server import Server

Storage = Literal["run file", "nothing"]
BATCH_EPISODES = 512
STALENESS = 1_000_000  # the fleet has weights of version 0 for ever
WINDOW = 64


class Sample(Struct, frozen=True):
    wall_s: float
    processor_s: float
    resident_bytes: int
    num_steps: int  # committed
    num_actors: int


class Closed(Struct, frozen=True):
    """After everything that came in is committed; the first two are read from the run file."""

    stored_steps: int
    excluded_episodes: int
    num_batches: int
    stats: ServerStats


def learn(orders: Connection, folder: Path, storage: Storage, concurrency: int) -> None:
    """The body of the process: says its address, a Sample for each "sample", at last Closed."""
    learner = StoringLearner(folder, concurrency) if storage == "run file" else EmptyLearner()
    orders.send(learner.address)
    while orders.recv() == "sample":
        orders.send(learner.sample())
    orders.send(learner.close())


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def sample(num_steps: int, num_actors: int) -> Sample:
    return Sample(time.perf_counter(), time.process_time(), resident_bytes(), num_steps, num_actors)


class CountingRunFile(RunFile):
    num_steps = 0

    def commit(
        self, deliveries: Sequence[tuple[str, Delivery]], limits: EpisodeLimits = NO_LIMITS
    ) -> Committed:
        committed = super().commit(deliveries, limits)
        self.num_steps += committed.num_steps
        return committed


class StoringLearner:
    def __init__(self, folder: Path, concurrency: int) -> None:
        self._run_file = CountingRunFile.create(folder, {"run_id": "fleet"})
        rules = SchedulerRules(
            seed=0,
            updates=10**9,
            batch_episodes=BATCH_EPISODES,
            max_staleness=STALENESS,
        )
        tasks = [Task(f"game-{number}", b"") for number in range(1000)]
        self._scheduler = Scheduler.create(rules, tasks, self._run_file)
        self._service = Service(
            run_id="fleet",
            name="fleet",
            run_dir=folder,
            setup=ActorSetup(
                environment="none:none",
                environment_options=b"{}",
                rollout=msgspec.json.encode(RolloutConfig(concurrency=concurrency)),
                model_config=msgspec.json.encode({"vocab_size": VOCABULARY}),
                model_dtype="float32",
                max_length=8192,
                tokenizer_files={},
                tokenizer_digest="none",
                seed=0,
            ),
            network=NetworkConfig(dead_after_s=60.0, window=WINDOW),
            run_file=self._run_file,
            scheduler=self._scheduler,
            note=lambda sentence: None,
        )
        self.address = self._service.start()
        self._closing = threading.Event()
        self._num_batches = 0
        self._consumer = threading.Thread(target=self._consume)
        self._consumer.start()

    def sample(self) -> Sample:
        self._service.check()
        return sample(self._run_file.num_steps, len(self._service.ready_actors()))

    def close(self) -> Closed:
        self._closing.set()
        self._consumer.join()
        self._service.close()
        self._run_file.close()
        with closing(sqlite3.connect(self._run_file.path)) as connection:
            [(stored,)] = connection.execute("SELECT COUNT(*) FROM steps")
            [(excluded,)] = connection.execute("SELECT COUNT(*) FROM episodes WHERE excluded != ''")
        return Closed(
            stored_steps=stored,
            excluded_episodes=excluded,
            num_batches=self._num_batches,
            stats=self._service._server.stats,
        )

    def _consume(self) -> None:
        """What updates do to scheduler and run file: take batches, advance the version."""
        while not self._closing.is_set():
            try:
                batch = self._scheduler.take_batch(0.2)
            except StorageFullError:  # a commit takes its time
                continue
            if batch is not None:
                self._num_batches += 1
                self._scheduler.version_advanced(self._num_batches)


class EmptyLearner:
    """A Handler that grants whatever is asked for and throws records away."""

    def __init__(self) -> None:
        self._numbers = count()
        self._actors: set[str] = set()
        self._num_steps = 0
        self._server = Server("tcp://127.0.0.1:0", self)
        self.address = self._server.start()

    def sample(self) -> Sample:
        return sample(self._num_steps, len(self._actors))

    def close(self) -> Closed:
        self._server.close()
        return Closed(self._num_steps, 0, 0, self._server.stats)

    def hello(self, hello: Hello) -> Welcome:
        self._actors.add(hello.actor_id)
        self._grant(hello.actor_id, hello.capacity)
        return Welcome(
            run_id="fleet",
            learner_name="fleet",
            last_sequence=0,
            window=WINDOW,
            heartbeat_s=1.0,
            dead_after_s=60.0,
            setup=None,
        )

    def commit(self, deliveries: Sequence[tuple[str, Delivery]]) -> None:
        for actor_id, delivery in deliveries:
            self._num_steps += len(delivery.steps)
            if delivery.ends:
                self._grant(actor_id, len(delivery.ends))

    def control(self, actor_id: str, message: ToLearner) -> None:
        pass

    def lost(self, actor_id: str, reason: str) -> None:
        self._actors.discard(actor_id)

    def report(self) -> bytes:
        return b"{}"

    def tick(self) -> None:
        pass

    def _grant(self, actor_id: str, num_leases: int) -> None:
        leases = tuple(
            Lease(
                lease_id=f"t{next(self._numbers):08d}",
                attempt=1,
                task=Task("game", b""),
                group_id="",
                member=0,
                purpose=Purpose.TRAIN,
                seed=0,
                policy_version=0,
            )
            for _ in range(num_leases)
        )
        self._server.send(actor_id, Grant(leases=leases))
