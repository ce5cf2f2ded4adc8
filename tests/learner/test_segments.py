from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capo.learner.episodes import full_sequences, prompts
from capo.learner.segments import segment, value_segments
from capo.protocol.records import EpisodeStatus
from tests.factories import episode, step


@st.composite
def episodes(draw):
    """Any pattern of keeping everything, a part or nothing; observations may be empty."""
    steps, length = [], 0
    ids = st.integers(0, 9)
    for index in range(draw(st.integers(1, 7))):
        keep = draw(st.one_of(st.just(length), st.integers(0, length)))
        observation = draw(st.lists(ids, min_size=0 if keep else 1, max_size=4))
        action = draw(st.lists(ids, min_size=1, max_size=4))
        steps.append(step(index, keep=keep, observation=observation, action=action))
        length = keep + len(observation) + len(action)
    if not draw(st.booleans()):
        return episode(steps)
    keep = draw(st.one_of(st.just(length), st.integers(0, length)))
    observation = draw(st.lists(ids, min_size=0 if keep else 1, max_size=4))
    return episode(
        steps, status=EpisodeStatus.TRUNCATED, final_keep=keep, final_observation=observation
    )


@given(episodes())
def test_every_action_is_trained_exactly_once_in_its_own_context(played):
    whole = list(full_sequences(played))
    trained = []
    for one in segment(played):
        spans = [(span.start, span.end) for span in one.actions]
        assert all(start < end for start, end in spans)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        for span in one.actions:
            assert one.token_ids[: span.end].tolist() == whole[span.step].tolist()
            assert span.end - span.start == len(played.steps[span.step].action)
            assert span.boundary == span.start - 1 >= 0
            trained.append(span.step)
    assert trained == list(range(len(played.steps)))


@given(episodes())
def test_a_segment_begins_exactly_where_a_prompt_does_not_extend_what_was(played):
    whole = list(full_sequences(played))
    breaks = sum(
        one.keep != len(before) for one, before in zip(played.steps[1:], whole, strict=False)
    )
    assert len(segment(played)) == 1 + breaks


@given(episodes())
def test_the_bootstrap_is_read_at_the_last_token_of_the_final_prompt(played):
    segments = segment(played)
    readable = value_segments(played, segments)
    assert readable.has_bootstrap == (played.end.status is EpisodeStatus.TRUNCATED)
    spans = [span for one in segments for span in one.actions]
    assert [span for one in readable.segments for span in one.actions] == spans
    if readable.has_bootstrap:
        *_, final_prompt = prompts(played)
        assert readable.segments[-1].token_ids.tolist() == final_prompt.tolist()
        grown = played.end.final_keep == len(segments[-1].token_ids)
        assert len(readable.segments) == len(segments) + (not grown)


def test_a_prompt_that_only_shares_a_prefix_starts_a_new_segment():
    first = step(observation=[1, 2], action=[3, 4])
    extends = step(keep=4, observation=[5], action=[6])
    rebuilt = step(keep=3, observation=[7], action=[8])
    merged, alone = segment(episode([first, extends, rebuilt]))
    assert merged.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert [(span.start, span.end) for span in merged.actions] == [(2, 4), (5, 6)]
    assert alone.token_ids.tolist() == [1, 2, 3, 7, 8]
    assert [(span.step, span.start, span.end) for span in alone.actions] == [(2, 4, 5)]


def test_an_action_without_tokens_or_prompt_is_refused():
    with pytest.raises(ValueError, match="3 prompt and 0 action tokens"):
        segment(episode([step(action=[])]))
    with pytest.raises(ValueError, match="0 prompt and 2 action tokens"):
        segment(episode([step(observation=[])]))


def test_a_truncated_episode_needs_its_final_observation():
    played = episode([step()], status=EpisodeStatus.TRUNCATED)
    with pytest.raises(ValueError, match="no final observation"):
        value_segments(played, segment(played))


def test_token_ids_stay_int32():
    (one,) = segment(episode([step(), step(keep=5)]))
    assert one.token_ids.dtype == np.int32
