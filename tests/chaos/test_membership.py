"""Actors come and go while weights are broadcast; the group is formed again, and nobody waits."""

import re
import signal
import time

from capo.learner.metrics_log import read_metrics
from tests.chaos.checker import check
from tests.chaos.fleet import Fleet

COMINGS_AND_GOINGS = 20


def wait_for_engines(fleet: Fleet, count: int) -> None:
    """Until a broadcast has reached so many, by what they proved, and no others."""
    deadline = time.monotonic() + 60
    while True:
        lines = read_metrics(fleet.run_dir)
        if lines and lines[-1].get("sync/engines", 0) == count:
            return
        fleet.look()
        assert time.monotonic() < deadline, f"{count} engines never came\n{fleet.story()}"
        time.sleep(0.1)


def test_twenty_joins_and_leaves_with_broadcasts_going_on(start_fleet):
    fleet = start_fleet(seed=5)
    fleet.add_actor()
    fleet.wait_for_updates(1)
    groups = set()
    for number in range(COMINGS_AND_GOINGS):
        if len(fleet.actors) < 2 or (len(fleet.actors) < 4 and fleet.random.random() < 0.5):
            fleet.add_actor()
        else:
            leaving = fleet.actors.pop(fleet.random.randrange(len(fleet.actors)))
            if number % 2:
                leaving.process.kill()
            else:
                leaving.process.signal(signal.SIGINT)
                assert leaving.process.wait(60) == 0, leaving.process.tail()
            leaving.wire.close()
        wait_for_engines(fleet, len(fleet.actors))
        groups.add(frozenset(actor.name for actor in fleet.actors))
    while len(fleet.actors) < 3:
        fleet.add_actor()
    fleet.wait_for_updates(2)
    fleet.wait(fleet.settled, "the leases of dead actors were given to others")
    assert fleet.end() == 130
    assert len(groups) > 5
    found = check(fleet.run_dir, fleet.logs, batch=12, group_size=1, staleness=1)
    assert found.faults == []


def test_an_actor_that_comes_during_a_broadcast_works_after_it(start_fleet):
    fleet = start_fleet()
    first = fleet.add_actor()
    fleet.wait_for_updates(1)
    fleet.wait(fleet.broadcasting, "weights are sent")
    first.process.signal(signal.SIGSTOP)  # the broadcast now waits for this one
    newcomer = fleet.add_actor()
    started = time.monotonic()
    fleet.wait(
        lambda: bool(
            fleet.query(
                "SELECT 1 FROM episodes JOIN actors USING (actor_id) "
                f"WHERE name = '{newcomer.name}'"
            )
        ),
        "the newcomer has played",
        limit_s=60,
    )
    first.process.signal(signal.SIGCONT)
    assert time.monotonic() - started < 60
    assert re.search(r"actor-0\S* did not get the weights of version", fleet.learner.text())
    fleet.wait_for_updates(3)
    assert fleet.end() == 130
    found = check(fleet.run_dir, fleet.logs, batch=12, group_size=1, staleness=1)
    assert found.faults == []


def test_a_learner_that_comes_back_forms_the_group_with_engines_that_are_up(start_fleet):
    fleet = start_fleet()
    actors = [fleet.add_actor() for _ in range(3)]
    fleet.wait_for_updates(2)
    pids = [actor.process.pid for actor in actors]
    for phase in ("broadcast", "update"):
        fleet.kill_learner(phase)
        fleet.wait_for_updates(2)
    assert [actor.process.pid for actor in actors] == pids
    assert all(actor.process.exit_code is None for actor in actors)
    for actor in actors:
        assert actor.process.text().count("waiting for the engine to start") == 1
    assert fleet.end() == 130
