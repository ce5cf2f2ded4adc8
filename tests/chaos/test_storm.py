"""The short form of `make chaos`: actors and learner killed, frozen and cut off in random order."""

from tests.chaos.storm import PHASES, storm


def test_nothing_is_lost_and_nothing_doubled(tmp_path):
    found, fleet = storm(tmp_path / "storm", "grpo", seconds=10, min_learner_kills=4, seed=7)
    print(found)
    assert found.faults == []
    assert found.figures["lost"] == found.figures["doubled"] == 0
    assert all(fleet.injected[f"learner killed -9 in {phase}"] >= 1 for phase in PHASES)
