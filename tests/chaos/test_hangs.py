"""Who waits for whom: told by `capo status` while things hang, and by SIGQUIT."""

import signal
import time

from tests.chaos.fleet import Fleet
from tests.chaos.forked import Forked, capo


def told(fleet: Fleet, sentence: str, limit_s: float = 30.0) -> str:
    """What `capo status RUN` prints, once it says `sentence`."""
    deadline = time.monotonic() + limit_s
    number = 0
    while True:
        number += 1
        asked = Forked(fleet.logs / f"status-{number}.log", capo, ["status", str(fleet.run_dir)])
        asked.wait(30)
        if asked.exit_code == 0 and sentence in asked.text():
            return asked.text()
        assert time.monotonic() < deadline, f"no {sentence!r} in:\n{asked.text()}"
        time.sleep(0.5)


def test_without_actors_it_says_that_nobody_plays(start_fleet):
    fleet = start_fleet()
    fleet.learner.wait_for("listens")
    text = told(fleet, "waits for the batch of version 0")
    assert "actors: none connected" in text


def test_a_frozen_actor_is_seen_as_silent_and_then_as_gone(start_fleet):
    fleet = start_fleet("network.dead_after_s=8.0")
    frozen = fleet.add_actor()
    fleet.wait_for_updates(1)
    frozen.process.signal(signal.SIGSTOP)
    text = told(fleet, "silent for")
    assert "actor actor-0" in text
    told(fleet, "actors: none connected", limit_s=60)
    frozen.process.signal(signal.SIGCONT)
    fleet.wait_for_updates(2)


def test_a_broadcast_that_hangs_names_whom_it_waits_for(start_fleet):
    fleet = start_fleet("network.dead_after_s=20.0", "weight_sync.transfer_timeout_s=8.0")
    fleet.add_actor()
    frozen = fleet.add_actor()
    fleet.wait_for_updates(1)
    frozen.process.signal(signal.SIGSTOP)
    text = told(fleet, "the broadcast waits for")
    assert "actor-1" in text.partition("the broadcast waits for")[2].splitlines()[0]
    frozen.process.signal(signal.SIGCONT)
    fleet.wait_for_updates(2)


def test_a_hanging_environment_shows_as_an_old_wait_for_its_actor(start_fleet):
    fleet = start_fleet(
        'environment.options.fault="hang"',
        "environment.options.fault_every=1",
        "rollout.env_timeout_s=60.0",
    )
    fleet.add_actor()
    text = told(fleet, "to end episode")
    assert "the scheduler waits for actor actor-0" in text


def test_a_dead_learner_is_not_reported_as_working(start_fleet):
    fleet = start_fleet()
    fleet.learner.wait_for("listens")
    told(fleet, "waits for the batch")
    fleet.learner.kill()
    text = told(fleet, "No learner is at work")
    assert f"capo run --resume {fleet.run_dir}" in text


def test_a_frozen_learner_is_reported_as_silent(start_fleet):
    fleet = start_fleet()
    fleet.learner.wait_for("listens")
    told(fleet, "waits for the batch")
    fleet.learner.signal(signal.SIGSTOP)
    text = told(fleet, "has not reported for")
    fleet.learner.signal(signal.SIGCONT)
    assert f"pid {fleet.learner.pid}" in text


def test_sigquit_prints_the_stacks_of_a_learner_and_it_goes_on(start_fleet):
    fleet = start_fleet()
    fleet.add_actor()
    fleet.wait_for_updates(1)
    fleet.learner.signal(signal.SIGQUIT)
    fleet.learner.wait_for("Current thread")
    fleet.learner.wait_for("learner/loop.py")  # the stacks are written piece by piece
    text = fleet.learner.text()
    assert text.count("Thread 0x") >= 1  # the server's and the writer's
    fleet.wait_for_updates(2)
