"""What a batch says about itself: versions, ages and prompts that were too long, by hand."""

import math

import msgspec
import numpy as np
import pytest

from capo.learner.batch import build_batch
from capo.learner.batch_metrics import batch_metrics, version_metrics
from capo.protocol.records import EpisodeStatus, VersionSpan
from tests.factories import batch_of_episodes, episode, step


def written_by(*spans):
    """A step whose tokens these (version, tokens) wrote."""
    versions = tuple(VersionSpan(*span) for span in spans)
    action = [4] * sum(span.num_tokens for span in versions)
    return msgspec.structs.replace(step(action=action), versions=versions)


def test_versions_are_counted_once_each_per_action_and_per_episode() -> None:
    first = episode([written_by((3, 2)), written_by((3, 1), (4, 1))], episode_id="a.1")
    second = episode([written_by((4, 1), (5, 1), (4, 1))], episode_id="b.1")
    found = version_metrics([first, second], 7)
    assert found == {
        "staleness/versions_per_action_mean": pytest.approx(5 / 3),  # 1, 2 and 2
        "staleness/versions_per_action_max": 2.0,
        "staleness/versions_per_episode_mean": 2.0,
        "staleness/versions_per_episode_max": 2.0,
        "queue/age_versions_mean": 2.5,  # since versions 4 and 5
        "queue/age_versions_max": 3.0,
    }


def test_an_episode_that_many_updates_passed_over_is_of_many_versions() -> None:
    long = episode([written_by((version, 1)) for version in range(6)], episode_id="a.1")
    found = version_metrics([long, episode(episode_id="b.1")], 6)
    assert found["staleness/versions_per_action_max"] == 1.0
    assert found["staleness/versions_per_episode_mean"] == 3.5
    assert found["staleness/versions_per_episode_max"] == 6.0


def test_prompts_that_were_too_long_are_summed_over_the_batch() -> None:
    counted = [
        {"overlong": 1.0, "dropped_messages": 0.0},
        {"overlong": 0.0, "dropped_messages": 4.0},
        {"overlong": 1.0, "dropped_messages": 6.0},
        {},  # an actor that counts nothing
    ]
    episodes = [
        msgspec.structs.replace(one, end=msgspec.structs.replace(one.end, metrics=metrics))
        for one, metrics in zip(batch_of_episodes(4), counted, strict=True)
    ]
    found = batch_metrics(build_batch(episodes), 0)
    assert (found["batch/overlong"], found["batch/dropped_messages"]) == (2.0, 10.0)


def test_counts_and_means_are_those_of_the_episodes() -> None:
    episodes = batch_of_episodes(7, seed=3)
    found = batch_metrics(build_batch(episodes), 2)
    steps = [one for played in episodes for one in played.steps]
    lengths = [len(one.action) for one in steps]
    truncated = [played.end.status is EpisodeStatus.TRUNCATED for played in episodes]
    returns = [sum(one.reward for one in played.steps) for played in episodes]
    assert found["batch/episodes"] == 7
    assert found["batch/actions"] == len(steps)
    assert found["batch/trained_tokens"] == sum(lengths)
    assert found["batch/tokens_per_action"] == np.mean(lengths)
    assert found["batch/actions_per_episode"] == len(steps) / 7
    assert found["batch/truncated"] == np.mean(truncated) > 0
    assert math.isclose(found["batch/return"], np.mean(returns), rel_tol=1e-12)
    assert found["queue/age_versions_mean"] == 2.0
