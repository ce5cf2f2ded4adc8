"""What a loop measures around an update: shares of time, ages in the queue, discarded lengths."""

from pathlib import Path

import pytest

from capo.learner.loop_metrics import actor_metrics, discard_metrics, sync_metrics, waiting_metrics
from capo.learner.run_file import RunFile
from capo.learner.run_reader import RunReader
from capo.learner.scheduler_status import Batch
from tests.learner.run_records import episode, lend
from tests.metrics_page import undescribed


def batch(*stale_tokens: int, flat_groups: int = 0) -> Batch:
    return Batch(
        version=3,
        episode_ids=(),
        again=False,
        waited_s=0.0,
        stale_tokens=stale_tokens,
        flat_groups=flat_groups,
    )


def test_waiting_is_a_share_of_the_time_since_the_update_before() -> None:
    found = waiting_metrics(1.0, 4.0, 100.0, [2.0, 0.5, 3.5])
    assert found == {
        "time/wait_s": 1.0,
        "system/tokens_per_s": 25.0,
        "system/idle_fraction": 0.25,
        "queue/age_s_mean": 2.0,
        "queue/age_s_max": 3.5,
    }
    assert "queue/age_s_mean" not in waiting_metrics(1.0, 4.0, 100.0, [])
    assert waiting_metrics(1.0, 4.0, 100.0, [-30.0, 0.0])["queue/age_s_mean"] == 0.0


def test_discarded_episodes_are_told_by_length() -> None:
    found = discard_metrics(batch(5, 6, 700, flat_groups=2))
    assert found == {
        "batch/flat_groups": 2.0,
        "staleness/discarded": 3.0,
        "staleness/discarded/length_4_7": 2.0,
        "staleness/discarded/length_512_1023": 1.0,
        "staleness/discarded_tokens_mean": 237.0,
        "staleness/discarded_tokens_max": 700.0,
    }
    assert undescribed(found) == set()
    assert discard_metrics(batch()) == {"batch/flat_groups": 0.0, "staleness/discarded": 0.0}


def test_without_a_broadcast_and_without_actors_nothing_is_made_up() -> None:
    assert sync_metrics(None) == {}
    assert actor_metrics([]) == {"actors/connected": 0.0, "actors/playing": 0.0}


def test_the_age_of_an_episode_runs_from_its_commit_to_the_update_that_takes_it(
    tmp_path: Path,
) -> None:
    now = [100.0]
    run_file = RunFile.create(tmp_path, {"run_id": "test"}, clock=lambda: now[0])
    run_file.actor_seen("ann", "host:1")
    lend(run_file, "ann", 0, 1, 2)
    for number, now[0] in enumerate((103.0, 104.5, 105.0)):
        run_file.commit([("ann", episode(number + 1, f"t{number:08d}.1"))])
    now[0] = 110.0
    run_file.begin_update(0, ["t00000001.1", "t00000000.1"])
    now[0] = 900.0
    run_file.begin_update(0, ["t00000001.1", "t00000000.1"])  # again, after a crash
    with RunReader(tmp_path) as reader:
        assert sorted(reader.queue_ages_s(0)) == pytest.approx([5.5, 7.0])
        assert reader.queue_ages_s(1) == []
    run_file.close()
