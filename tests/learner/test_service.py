"""The learner as actors see it: over real sockets, with a real scheduler and run file."""

import json
import threading
import time
from pathlib import Path

import msgspec
import pytest

from capo.configs.schema import NetworkConfig, RolloutConfig
from capo.learner.run_file import RunFile
from capo.learner.run_ingest import store
from capo.learner.scheduler import Scheduler
from capo.learner.scheduler_rules import SchedulerRules
from capo.learner.service import Service
from capo.protocol.errors import PeerLostError, StorageFullError
from capo.protocol.messages import (
    ActorHeartbeat,
    ActorSetup,
    Drain,
    Goodbye,
    Grant,
    Ready,
)
from capo.protocol.status_query import ask_status
from tests.learner.run_records import episode, new_run, task
from tests.protocol.wire import RawActor, make_hello, wait_until

DEAD_AFTER_S = 0.7
SETUP = ActorSetup(
    environment="tests:none",
    environment_options=b"{}",
    rollout=msgspec.json.encode(RolloutConfig(concurrency=4)),
    model_config=b'{"vocab_size": 1000}',
    model_dtype="float32",
    max_length=64,
    tokenizer_files={},
    tokenizer_digest="digest",
    seed=0,
)


class Rig:
    """A service over a new run of one batch of two episodes."""

    def __init__(self, folder: Path, run_file: RunFile | None = None) -> None:
        self.notes: list[str] = []
        self.run_file = run_file or new_run(folder)
        rules = SchedulerRules(seed=0, updates=9, batch_episodes=2)
        self.scheduler = Scheduler.create(rules, [task(0), task(1)], self.run_file)
        self.service = Service(
            run_id="run",
            name="learner",
            run_dir=folder,
            setup=SETUP,
            network=NetworkConfig(heartbeat_s=0.2, dead_after_s=DEAD_AFTER_S),
            run_file=self.run_file,
            scheduler=self.scheduler,
            note=self.notes.append,
        )
        self.address = self.service.start()

    def close(self) -> None:
        self.service.close()
        self.run_file.close()


class Player(RawActor):
    """An actor with weights; it says what it holds until it is closed."""

    def __init__(self, address: str, name: str, **hello) -> None:
        super().__init__(address)
        self.name = name
        self.held: tuple[str, ...] = ()
        self.ready = False
        self.send(make_hello(name, **{"capacity": 2, "weights_version": 0, **hello}))
        self.welcome = self.receive()

    def beat_until(self, condition, what: str) -> None:
        def beat() -> bool:
            self.send(ActorHeartbeat(held_leases=self.held, ready=self.ready))
            time.sleep(0.05)
            return condition()

        wait_until(beat, what)


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path / "run")
    yield rig
    rig.close()


def granted(actor: RawActor, limit_s: float = 20.0) -> list[str]:
    """The episodes of the next grant, none if there is none in time."""
    while (message := actor.receive(limit_s)) is not None:
        if isinstance(message, Grant):
            return [lease.episode_id for lease in message.leases]
    return []


def test_a_grant_that_got_lost_is_given_to_somebody_else(rig):
    with Player(rig.address, "ann") as ann:
        assert granted(ann) == ["t00000000.1", "t00000001.1"]
        ann.held = ("t00000001.1",)  # as if the network had dropped the first
        ann.beat_until(lambda: rig.scheduler.status().counts.get("reissued", 0) == 1, "reissued")
        assert granted(ann) == ["t00000000.2"]
        ann.held = ("t00000001.1", "t00000000.2")
        started = time.monotonic()
        ann.beat_until(lambda: time.monotonic() > started + 2 * DEAD_AFTER_S, "time passes")
        assert rig.scheduler.status().counts["granted"] == 3


def test_an_actor_whose_ready_got_lost_is_ready_by_its_heartbeat(rig):
    with Player(rig.address, "ann", weights_version=-1) as ann:
        ann.ready = False
        ann.send(ActorHeartbeat())
        assert rig.service.ready_actors() == []
        ann.ready = True
        ann.beat_until(lambda: rig.service.ready_actors() == ["ann"], "the actor is ready")


def test_who_missed_the_order_to_leave_is_told_again(rig):
    with Player(rig.address, "ann") as ann:
        draining = threading.Thread(
            target=rig.service.drain, args=("done", 15.0), kwargs={"abort": True}
        )
        draining.start()
        told: list[object] = []

        def told_twice() -> bool:
            told.append(ann.receive(0.05))
            return sum(isinstance(message, Drain) for message in told) >= 2

        ann.beat_until(told_twice, "it was told twice")
        ann.send(Goodbye(reason="done"))
        draining.join(15)
        assert not draining.is_alive()


def test_an_actor_that_does_not_leave_is_named(rig):
    with Player(rig.address, "ann") as ann:
        with pytest.raises(PeerLostError, match="ann did not leave within 0 s"):
            rig.service.drain("done", 0.2, abort=True)
        assert ann.welcome.run_id == "run"


def test_an_actor_may_join_while_the_disk_is_full(rig, monkeypatch):
    room = threading.Event()
    actor_seen = rig.run_file.actor_seen

    def seen(actor_id: str, name: str) -> None:
        if not room.is_set():
            raise StorageFullError("the disk is full")
        actor_seen(actor_id, name)

    monkeypatch.setattr(rig.run_file, "actor_seen", seen)
    with Player(rig.address, "ann", actor_name="ann of the north") as ann:
        [first, _] = granted(ann)
        ann.send(episode(1, first))
        room.set()
        wait_until(lambda: rig.run_file.last_sequence("ann") == 1, "the delivery is stored")

        def name() -> str:
            database = rig.run_file._connection
            return database.execute("SELECT name FROM actors").fetchone()[0]

        wait_until(lambda: name() == "ann of the north", "its name is stored")


def test_the_status_says_since_when_a_commit_waits_for_the_disk(rig, monkeypatch):
    """Also while an actor joins and another one falls silent, which would write to it too."""
    disk = threading.Event()

    def slow(*arguments):
        assert disk.wait(60)
        return store(*arguments)

    monkeypatch.setattr("capo.learner.run_file.store", slow)
    monkeypatch.setattr("capo.learner.run_file.BUSY_S", 0.3)
    with Player(rig.address, "ann") as ann, Player(rig.address, "bob") as bob:
        [first] = granted(ann)
        assert rig.service.status().waits == ()
        ann.held = (first,)
        ann.send(episode(1, first))
        ann.beat_until(lambda: rig.service.status().waits != (), "the status says so")
        [wait] = rig.service.status().waits
        assert (wait.who, wait.whom) == (
            "the commit of deliveries",
            f"the disk of {rig.run_file.path}",
        )
        assert wait.since_s > 1.0
        assert bob.welcome.run_id == "run"
        ann.beat_until(lambda: any("bob is gone" in note for note in rig.notes), "bob is gone")
        with Player(rig.address, "cat") as cat:
            assert cat.welcome.run_id == "run"
            asked = json.loads(ask_status(rig.address))
            assert [one["whom"] for one in asked["waits"]] == [wait.whom]
            assert "cat" in [actor["actor_id"] for actor in asked["actors"]]
        disk.set()
        wait_until(lambda: rig.run_file.last_sequence("ann") == 1, "the delivery is stored")
        wait_until(lambda: rig.service.status().waits == (), "nobody waits any more")


def test_the_status_says_since_when_an_actor_is_silent(rig):
    with Player(rig.address, "ann") as ann:
        ann.send(ActorHeartbeat(waiting_for="leases"))
        wait_until(lambda: rig.service.actors()[0].waiting_for == "leases", "the heartbeat came")
        before = rig.service.actors()[0].silent_s
        time.sleep(0.2)
        assert rig.service.actors()[0].silent_s >= before + 0.19


def test_a_delivery_frees_a_place_and_the_next_batch_waits_for_its_version(rig):
    with Player(rig.address, "ann") as ann:
        first, second = granted(ann)
        ann.send(Ready(weights_version=0))
        for number, name in enumerate((first, second), start=1):
            ann.send(episode(number, name))
        wait_until(lambda: rig.scheduler.status().buffered == 2, "both are in")
        batch = rig.scheduler.take_batch(1.0)
        assert batch.episode_ids == (first, second)


def test_who_has_old_weights_plays_nothing_that_would_be_too_old(rig):
    with Player(rig.address, "ann") as ann, Player(rig.address, "bob", weights_version=-1) as bob:
        for number, name in enumerate(granted(ann), start=1):
            ann.send(episode(number, name))
        wait_until(lambda: rig.scheduler.status().buffered == 2, "both are in")
        rig.scheduler.take_batch(1.0)
        rig.scheduler.version_advanced(1)
        rig.service.deal()
        assert granted(ann, 0.3) == []  # it has version 0, and no staleness is allowed
        bob.send(Ready(weights_version=1))
        assert granted(bob) == ["t00000002.1", "t00000003.1"]


def test_an_evaluation_is_played_with_its_own_weights(rig):
    rig.scheduler.start_evaluation([task(5)], ["greedy"])
    with Player(rig.address, "ann", weights_version=3) as ann:
        assert granted(ann, 0.3) == []
        ann.send(Ready(weights_version=0))
        assert granted(ann) == ["e0001-greedy-00000.1"]


def test_a_resumed_run_that_ends_at_once_still_sends_home_who_comes_back(tmp_path):
    before = new_run(tmp_path)
    before.actor_seen("ann", "ann")
    before.close()
    rig = Rig(tmp_path, RunFile.open(tmp_path))
    draining = threading.Thread(
        target=rig.service.drain, args=("done", 15.0), kwargs={"abort": False}
    )
    draining.start()
    try:
        with Player(rig.address, "ann") as ann:
            assert isinstance(ann.receive(), Drain)
            ann.send(Goodbye(reason="done"))
            draining.join(15)
            assert not draining.is_alive()
    finally:
        rig.close()
