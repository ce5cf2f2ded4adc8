"""What an actor's heartbeats say about its work."""

import pytest

from capo.actors.counts import Counts
from capo.protocol.records import EpisodeEnd, EpisodeStatus


def test_rates_are_over_the_time_since_the_heartbeat_before() -> None:
    counts = Counts(now=100.0)
    counts.tokens = 50
    counts.busy(102.0, playing=True)
    counts.busy(105.0, playing=False)
    first = counts.metrics(110.0)
    assert first["tokens_per_s"] == pytest.approx(5.0)
    assert first["busy_fraction"] == pytest.approx(0.3)
    counts.tokens = 60
    counts.busy(111.0, playing=True)  # and still at the next heartbeat
    second = counts.metrics(114.0)
    assert second["tokens_per_s"] == pytest.approx(2.5)
    assert second["busy_fraction"] == pytest.approx(0.75)
    assert counts.metrics(118.0)["busy_fraction"] == pytest.approx(1.0)


def test_two_heartbeats_at_once_repeat_the_rates() -> None:
    counts = Counts(now=0.0)
    counts.tokens = 8
    first = counts.metrics(2.0)
    assert first["tokens_per_s"] == pytest.approx(4.0)
    counts.tokens = 9
    assert counts.metrics(2.1) == first | {"tokens": 9.0}


def test_episodes_are_counted_by_how_they_ended() -> None:
    counts = Counts(now=0.0)
    for status in (EpisodeStatus.TERMINATED, EpisodeStatus.TERMINATED, EpisodeStatus.ENV_ERROR):
        counts.count(EpisodeEnd(episode_id="l.0", status=status, num_steps=0))
    told = counts.metrics(1.0)
    assert told["episodes_terminated"] == 2.0
    assert told["episodes_env_error"] == 1.0
    assert told["episodes_truncated"] == 0.0
