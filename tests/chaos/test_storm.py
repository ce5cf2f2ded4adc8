"""The short form of `make chaos`: actors and learner killed, frozen and cut off in random order."""

import pytest

from tests.chaos.checker import check
from tests.chaos.fleet import Fleet
from tests.chaos.storm import KINDS, storm
from tests.chaos.wire import Rates


def test_nothing_is_lost_and_nothing_doubled(tmp_path):
    found, fleet = storm(tmp_path / "storm", "grpo", seconds=10, min_learner_kills=5, seed=7)
    print(found)
    assert found.faults == []
    assert found.figures["lost"] == found.figures["doubled"] == 0
    assert all(fleet.injected[kind] >= 1 for kind in KINDS)


@pytest.mark.slow
def test_a_network_that_never_behaves_slows_the_run_but_does_not_stop_it(tmp_path):
    """No connection breaks here, so nothing is made good by a new introduction."""
    with Fleet(tmp_path / "noisy", 3) as fleet:
        for _ in range(3):
            fleet.add_actor()
        fleet.wait_for_updates(1)
        for actor in fleet.actors:
            actor.wire.rates = Rates(drop=0.02, double=0.1, reorder=0.05, delay=0.05)
        fleet.wait_for_updates(8, limit_s=180)
        for actor in fleet.actors:
            actor.wire.rates = Rates()
        fleet.wait_for_updates(1)
        spoiled = fleet.messages_spoiled()
        assert fleet.end() == 130
        assert min(spoiled[kind] for kind in ("dropped", "doubled", "reordered", "delayed")) > 0
        found = check(fleet.run_dir, fleet.logs, batch=12, group_size=1, staleness=1)
        assert found.faults == []
