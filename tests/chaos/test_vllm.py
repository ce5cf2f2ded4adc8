"""Real vLLM engines: some come and go while weights are sent, one stays through everything."""

import os
import signal
import time
from pathlib import Path

import pytest

from capo.learner.metrics_log import read_metrics
from tests.chaos.checker import check
from tests.chaos.fleet import Actor, Fleet
from tests.chaos.storm import torment

pytestmark = pytest.mark.slow

REAL = (
    "rollout.enforce_eager=true",
    "model.tiny.head_dim=32",  # the smallest that vLLM's attention on CPUs takes
    "environment.options.step_s=0.1",  # leaves the cores to the engines that start
    "network.dead_after_s=8.0",  # two cores, and an engine that starts takes both
    "weight_sync.join_timeout_s=15.0",
    "weight_sync.transfer_timeout_s=20.0",
)
PATIENCE_S = 240.0  # for one update, while engines start
GUESTS = 10


def wait_for_engines(fleet: Fleet, count: int) -> int:
    """Until so many have proved the same new weights; returns that version."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        lines = read_metrics(fleet.run_dir)
        if lines and lines[-1].get("sync/engines", 0) == count:
            return int(lines[-1]["version"])
        fleet.look()
        assert time.monotonic() < deadline, f"{count} engines never came\n{fleet.story()}"
        time.sleep(0.3)


def leave(fleet: Fleet, guest: Actor, how: str) -> None:
    fleet.actors.remove(guest)
    if how == "killed in a broadcast":
        fleet.wait(lambda: guest.wire.receiving, "weights are sent to it", PATIENCE_S)
        guest.process.kill()
    elif how == "killed":
        guest.process.kill()
    elif how == "frozen, then killed":
        guest.process.signal(signal.SIGSTOP)
        wait_for_engines(fleet, 1)
        guest.process.kill()
    else:
        guest.process.signal(signal.SIGINT)
        assert guest.process.wait(60) == 0, guest.process.tail()
    guest.wire.close()


def test_twenty_joins_and_leaves_of_real_engines_with_broadcasts_going_on(start_fleet):
    fleet = start_fleet(*REAL)
    resident = fleet.add_vllm_actor()
    wait_for_engines(fleet, 1)
    engine = resident.process.descendants()
    assert engine
    ways = ["killed in a broadcast", "sent home", "killed", "frozen, then killed"]
    for number in range(GUESTS):
        guest = fleet.add_vllm_actor()
        version = wait_for_engines(fleet, 2)
        way = ways[number % len(ways)]
        leave(fleet, guest, way)
        started = time.monotonic()
        alone = wait_for_engines(fleet, 1)
        print(
            f"guest {number} got version {version}, was {way}; the others went on without it "
            f"after {time.monotonic() - started:.1f} s, at version {alone}",
            flush=True,
        )
        if number == GUESTS // 2:
            fleet.kill_learner("broadcast")
            fleet.wait_for_updates(1, PATIENCE_S)
    assert resident.process.descendants() == engine
    assert resident.process.text().count("waiting for the engine to start") == 1
    fleet.wait(fleet.settled, "the leases of dead actors were given to others")
    assert fleet.end() == 130
    gaps = [line.get("sync/probe_gap_max", 0.0) for line in read_metrics(fleet.run_dir)]
    assert 0 < max(gaps) < 1e-3
    found = check(fleet.run_dir, fleet.logs, batch=12, group_size=1, staleness=1)
    print(found)
    assert found.faults == []


def test_a_storm_with_a_real_engine_among_the_scripted_ones(start_fleet):
    """The learner is killed in every phase; the real engine is the same process at the end."""
    fleet = start_fleet(*REAL)
    resident = fleet.add_vllm_actor()
    wait_for_engines(fleet, 1)
    engine = resident.process.descendants()
    for _ in range(2):
        fleet.add_actor()
    resident.spared = True
    torment(fleet, seconds=120, min_learner_kills=8, seed=3, limit_s=PATIENCE_S)
    wait_for_engines(fleet, 3)
    assert resident.process.descendants() == engine
    fleet.wait(fleet.settled, "the leases of dead actors were given to others")
    assert fleet.end() == 130
    found = check(fleet.run_dir, fleet.logs, batch=12, group_size=1, staleness=1)
    print(found, dict(fleet.injected))
    assert found.faults == []


def test_an_actor_whose_engine_hangs_ends_with_the_order_it_hung_in(start_fleet):
    fleet = start_fleet(*REAL, "rollout.engine_timeout_s=8.0")
    actor = fleet.add_vllm_actor()
    wait_for_engines(fleet, 1)
    cores = [pid for pid in actor.process.descendants() if "EngineCore" in name_of(pid)]
    assert cores
    actor.doomed = True
    for pid in cores:
        os.kill(pid, signal.SIGSTOP)
    assert actor.process.wait(120) == 1
    assert "the inference engine hangs: it" in actor.process.text()
    fleet.add_actor()  # another one goes on with what it played
    fleet.wait_for_updates(2, PATIENCE_S)


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
