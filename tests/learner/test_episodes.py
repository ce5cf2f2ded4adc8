import numpy as np
import pytest

from capo.learner.episodes import full_sequences, prompts, staleness, token_versions
from capo.protocol.records import EpisodeStatus, VersionSpan
from tests.factories import episode, step


def test_prompts_are_rebuilt_from_what_each_step_keeps():
    played = episode(
        [
            step(observation=[1, 2], action=[3]),
            step(keep=3, observation=[4], action=[5, 6]),
            step(keep=2, observation=[7], action=[8]),
        ]
    )
    assert [one.tolist() for one in prompts(played)] == [[1, 2], [1, 2, 3, 4], [1, 2, 7]]
    assert [one.tolist() for one in full_sequences(played)] == [
        [1, 2, 3],
        [1, 2, 3, 4, 5, 6],
        [1, 2, 7, 8],
    ]


def test_the_final_prompt_of_a_truncated_episode_comes_last():
    played = episode(
        [step(observation=[1, 2], action=[3])],
        status=EpisodeStatus.TRUNCATED,
        final_keep=3,
        final_observation=[9],
    )
    assert [one.tolist() for one in prompts(played)] == [[1, 2], [1, 2, 3, 9]]
    assert len(list(full_sequences(played))) == 1


def test_keeping_more_than_there_is_names_both_numbers():
    played = episode([step(observation=[1], action=[2]), step(keep=3, observation=[4])])
    with pytest.raises(ValueError, match=r"step 1 of episode .* keeps 3 tokens of a sequence of 2"):
        list(prompts(played))


def test_versions_are_spread_over_the_tokens_they_cover():
    sampled = step(action=[1, 2, 3], version=4)
    assert token_versions(sampled).tolist() == [4, 4, 4]
    short = step(action=[1, 2, 3])
    with pytest.raises(ValueError, match="cover 2 tokens, but the action has 3"):
        token_versions(type(short)(**{**_fields(short), "versions": (VersionSpan(0, 2),)}))


def test_staleness_counts_from_the_oldest_token_of_the_episode():
    first, second = step(version=3), step(keep=5, version=5)
    mixed = type(second)(**{**_fields(second), "versions": (VersionSpan(5, 1), VersionSpan(6, 1))})
    assert staleness(episode([first, mixed]), 7) == 4
    assert staleness(episode([mixed]), 7) == 2
    assert np.array_equal(token_versions(mixed), [5, 6])


def _fields(record):
    return {name: getattr(record, name) for name in record.__struct_fields__}
