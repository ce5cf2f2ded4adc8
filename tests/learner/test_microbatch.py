import torch

from capo.learner.batch import build_batch
from capo.learner.microbatch import collate
from tests.factories import batch_of_episodes, episode, step

CPU = torch.device("cpu")


def test_spans_boundaries_and_labels_of_two_packed_segments():
    batch = build_batch(
        [
            episode(
                [
                    step(observation=[1, 2], action=[3, 4]),
                    step(keep=4, observation=[5], action=[6]),
                ],
                episode_id="a",
            ),
            episode([step(observation=[7], action=[8, 9])], episode_id="b"),
        ]
    )
    second, first = batch.segments[1][0], batch.segments[0][0]
    packed = collate([second, first], CPU)
    assert packed.token_ids.tolist() == [7, 8, 9, 1, 2, 3, 4, 5, 6]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert packed.cu_seqlens.tolist() == [0, 3, 9]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.max_length == 6
    assert packed.predictors.tolist() == [0, 1, 4, 5, 7]
    assert packed.labels.tolist() == [8, 9, 3, 4, 6]
    assert packed.action_of_token.tolist() == [0, 0, 1, 1, 2]
    assert packed.boundaries.tolist() == [0, 4, 7]
    assert packed.actions.tolist() == [2, 0, 1]
    assert packed.tokens.tolist() == [3, 4, 0, 1, 2]
    assert packed.last_tokens.tolist() == [2, 8]


def test_labels_are_the_batch_s_action_tokens_and_nothing_else():
    batch = build_batch(batch_of_episodes(7))
    sampled = [
        token for one in batch.episodes for played in one.steps for token in played.action.tolist()
    ]
    packed = collate([placed for segments in batch.segments for placed in segments], CPU)
    assert packed.labels.tolist() == sampled  # forced and observed tokens appear nowhere
    assert packed.tokens.tolist() == list(range(batch.num_tokens))
    assert packed.actions.tolist() == list(range(batch.num_actions))


def test_an_empty_microbatch_is_one_context_token_that_trains_nothing():
    packed = collate([], CPU)
    assert packed.token_ids.shape == (1,)
    assert packed.cu_seqlens.tolist() == [0, 1]
    for empty in (packed.predictors, packed.labels, packed.boundaries, packed.actions):
        assert empty.shape == (0,)
        assert empty.dtype == torch.int64
