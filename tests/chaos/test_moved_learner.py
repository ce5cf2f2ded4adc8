"""A learner that stops for a while or is killed and comes back at another address: its actors stay,
and those that know its run's folder find it."""

import signal

from tests.chaos import scripted_actor
from tests.chaos.processes import Forked


def test_an_actor_that_knows_the_run_follows_its_learner_to_another_address(start_fleet):
    fleet = start_fleet()
    follower = Forked(
        fleet.logs / "follower.log",
        scripted_actor.run,
        str(fleet.run_dir),
        "follower",
        str(fleet.logs / "follower.engine"),
        token_s=0.003,
    )
    try:
        fleet.wait_for_updates(2)
        before = fleet.address
        fleet.learner.signal(signal.SIGUSR1)
        assert fleet.learner.wait(60) == 130
        fleet.move_learner()
        assert fleet.address != before
        fleet.wait_for_updates(2)
        fleet.move_learner()
        fleet.wait_for_updates(2)
        assert follower.exit_code is None  # the process, and so the engine, is the same
        assert fleet.end() == 130
        assert follower.wait(30) == 0, follower.tail()
    finally:
        follower.kill()
