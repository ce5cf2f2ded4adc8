import msgspec
import numpy as np
import pytest

from capo.learner.batch import build_batch
from capo.protocol.records import EpisodeStatus
from tests.factories import batch_of_episodes, episode, step


def test_flat_columns_follow_episodes_then_steps():
    batch = build_batch(
        [
            episode([step(reward=3.0, version=2)], episode_id="b"),
            episode([step(reward=1.0), step(keep=5, action=[1, 2, 3], reward=2.0)], episode_id="a"),
        ]
    )
    assert [one.episode_id for one in batch.episodes] == ["a", "b"]
    assert batch.rewards.tolist() == [1.0, 2.0, 3.0]
    assert batch.episode_of_action.tolist() == [0, 0, 1]
    assert batch.step_of_action.tolist() == [0, 1, 0]
    assert batch.lengths.tolist() == [2, 3, 2]
    assert batch.versions.tolist() == [0, 0, 2]
    assert batch.action_of_token.tolist() == [0, 0, 1, 1, 1, 2, 2]


def test_the_order_of_arrival_is_forgotten():
    episodes = batch_of_episodes(6)
    one, other = build_batch(episodes), build_batch(episodes[::-1])
    assert [a.episode_id for a in one.episodes] == [b.episode_id for b in other.episodes]
    assert np.array_equal(one.behaviour_logprobs, other.behaviour_logprobs)


def test_every_truncated_episode_has_one_bootstrap():
    batch = build_batch(batch_of_episodes(9))
    owners = [one.bootstrap_of for one in batch.value_segments if one.bootstrap_of is not None]
    truncated = [
        index
        for index, one in enumerate(batch.episodes)
        if one.end.status is EpisodeStatus.TRUNCATED
    ]
    assert owners == truncated
    actions = [span for one in batch.value_segments for span in one.placed.segment.actions]
    assert len(actions) == batch.num_actions


def test_a_bootstrap_prompt_of_its_own_trains_nothing():
    broken = episode(
        [step()], status=EpisodeStatus.TRUNCATED, final_keep=1, final_observation=[7, 8]
    )
    batch = build_batch([broken])
    assert [len(segments) for segments in batch.segments] == [1]
    assert len(batch.value_segments) == 2
    assert batch.value_segments[1].placed.segment.actions == ()


def test_entropies_are_there_only_if_every_step_has_them():
    with_entropy = step(entropies=np.array([0.5, 0.25], dtype=np.float32))
    assert build_batch([episode([with_entropy])]).entropies.tolist() == [0.5, 0.25]
    assert build_batch([episode([with_entropy, step(keep=5)])]).entropies is None


def test_what_is_no_training_data_is_refused():
    with pytest.raises(ValueError, match="ended as env_error"):
        build_batch([episode(status=EpisodeStatus.ENV_ERROR)])
    with pytest.raises(ValueError, match="twice"):
        build_batch([episode(), episode()])
    with pytest.raises(ValueError, match="no action to train on"):
        build_batch([msgspec.structs.replace(episode(), steps=())])
    wrong = msgspec.structs.replace(step(), behaviour_logprobs=np.zeros(1, dtype=np.float32))
    with pytest.raises(ValueError, match="1 log-probs for 2 action tokens"):
        build_batch([episode([wrong])])
