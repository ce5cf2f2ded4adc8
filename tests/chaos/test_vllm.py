"""Real vLLM engines: some come and go while weights are sent, one stays through everything."""

import signal
import time

import pytest

from capo.learner.metrics_log import read_metrics
from tests.chaos.checker import check
from tests.chaos.fleet import Actor, Fleet
from tests.chaos.storm import torment

pytestmark = pytest.mark.slow

REAL = (
    "rollout.enforce_eager=true",
    "model.tiny.head_dim=32",  # the smallest that vLLM's attention on CPUs takes
    "network.dead_after_s=8.0",  # two cores, and an engine that starts takes both
    "weight_sync.join_timeout_s=15.0",
    "weight_sync.transfer_timeout_s=20.0",
)
PATIENCE_S = 240.0  # for one update, while engines start
GUESTS = 10


def newest(fleet: Fleet) -> dict:
    lines = read_metrics(fleet.run_dir)
    return lines[-1] if lines else {"version": 0, "sync/engines": 0}


def wait_for_engines(fleet: Fleet, count: int) -> int:
    """Until so many have proved the same new weights; returns that version."""
    fleet.wait(lambda: newest(fleet)["sync/engines"] == count, f"{count} engines", PATIENCE_S)
    return newest(fleet)["version"]


def leave(fleet: Fleet, guest: Actor, how: str) -> None:
    fleet.actors.remove(guest)
    if how == "killed in a broadcast":
        fleet.wait(lambda: guest.wire.receiving, "weights are sent to it", PATIENCE_S)
        guest.process.kill()
    elif how == "killed":
        guest.process.kill()
    elif how == "frozen, then killed":
        guest.process.signal(signal.SIGSTOP)
        fleet.wait(lambda: newest(fleet)["sync/engines"] == 1, "it is dropped", PATIENCE_S)
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
        fleet.wait(lambda: newest(fleet)["sync/engines"] == 1, "one engine is left", PATIENCE_S)
        print(
            f"guest {number} came at version {version}, was {way}; "
            f"alone again after {time.monotonic() - started:.1f} s, version "
            f"{newest(fleet)['version']}",
            flush=True,
        )
        if number == GUESTS // 2:
            fleet.kill_learner("broadcast")
            fleet.wait_for_updates(1, PATIENCE_S)
    assert resident.process.descendants() == engine
    assert resident.process.text().count("waiting for the engine to start") == 1
    fleet.wait(fleet.settled, "the leases of dead actors were given to others")
    assert fleet.end() == 130
    assert max(line["sync/probe_gap_max"] for line in read_metrics(fleet.run_dir)) < 1e-3
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
