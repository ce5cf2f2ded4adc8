"""One update's episodes as flat arrays. E episodes, K actions, N trained tokens.

Actions stand episode by episode in step order, tokens action by action. Episodes are sorted by
their id first, so that the order in which they arrived changes nothing, not even rounding.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from capo.learner.episodes import Episode, oldest_version
from capo.learner.microbatch import PlacedSegment
from capo.learner.segments import segment, value_segments
from capo.protocol.records import EpisodeStatus, FloatArray

Integers = NDArray[np.int64]


class ValueSegment(Struct, frozen=True):
    """What the critic reads; `bootstrap_of` is the episode whose bootstrap its last token gives."""

    placed: PlacedSegment
    bootstrap_of: int | None


class Batch(Struct, frozen=True, kw_only=True):
    episodes: tuple[Episode, ...]  # [E]
    segments: tuple[tuple[PlacedSegment, ...], ...]  # [E]
    value_segments: tuple[ValueSegment, ...]
    episode_of_action: Integers  # [K]
    step_of_action: Integers  # [K], position within its episode
    lengths: Integers  # [K], tokens
    versions: Integers  # [K], the oldest that sampled one of its tokens
    rewards: NDArray[np.float64]  # [K]
    state_keys: tuple[str, ...]  # [K]
    behaviour_logprobs: FloatArray  # [N]
    entropies: FloatArray | None  # [N], None unless every step has them

    @property
    def num_actions(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def action_of_token(self) -> Integers:  # [N]
        return np.repeat(np.arange(self.num_actions), self.lengths)


def build_batch(episodes: Sequence[Episode]) -> Batch:
    """Raises ValueError for an episode that is no training data, or one that is there twice."""
    ordered = tuple(sorted(episodes, key=lambda episode: episode.episode_id))
    for one, next_one in pairwise(ordered):
        if one.episode_id == next_one.episode_id:
            raise ValueError(f"episode {one.episode_id} is in the batch twice")
    for episode in ordered:
        if episode.end.status not in (EpisodeStatus.TERMINATED, EpisodeStatus.TRUNCATED):
            raise ValueError(
                f"episode {episode.episode_id} ended as {episode.end.status}, which is no training "
                "data"
            )
    steps = [step for episode in ordered for step in episode.steps]
    if not steps:
        raise ValueError(f"the {len(ordered)} episodes of the batch contain no action to train on")
    for step in steps:
        if len(step.behaviour_logprobs) != len(step.action):
            raise ValueError(
                f"step {step.index} of episode {step.episode_id} has "
                f"{len(step.behaviour_logprobs)} log-probs for {len(step.action)} action tokens"
            )
    lengths = np.array([len(step.action) for step in steps], dtype=np.int64)
    sizes = np.array([len(episode.steps) for episode in ordered], dtype=np.int64)
    segments, for_values = _place(ordered, lengths)
    entropies = [step.entropies for step in steps if step.entropies is not None]
    return Batch(
        episodes=ordered,
        segments=segments,
        value_segments=for_values,
        episode_of_action=np.repeat(np.arange(len(ordered)), sizes),
        step_of_action=np.concatenate([np.arange(size) for size in sizes]),
        lengths=lengths,
        versions=np.array([oldest_version(step) for step in steps], dtype=np.int64),
        rewards=np.array([step.reward for step in steps], dtype=np.float64),
        state_keys=tuple(step.state_key for step in steps),
        behaviour_logprobs=np.concatenate([step.behaviour_logprobs for step in steps]),
        entropies=np.concatenate(entropies) if len(entropies) == len(steps) else None,
    )


def _place(
    episodes: Sequence[Episode], lengths: Integers
) -> tuple[tuple[tuple[PlacedSegment, ...], ...], tuple[ValueSegment, ...]]:
    """The episodes' segments, for training and for values, with their flat offsets."""
    first_tokens = np.cumsum(lengths) - lengths
    training: list[tuple[PlacedSegment, ...]] = []
    for_values: list[ValueSegment] = []
    action = 0
    for index, episode in enumerate(episodes):
        segments = segment(episode)
        placed: list[PlacedSegment] = []
        for one in segments:
            placed.append(PlacedSegment(one, action, int(first_tokens[action])))
            action += len(one.actions)
        training.append(tuple(placed))
        readable = value_segments(episode, segments)
        for number, one in enumerate(readable.segments):
            where = placed[min(number, len(placed) - 1)]
            last = readable.has_bootstrap and number == len(readable.segments) - 1
            for_values.append(
                ValueSegment(
                    PlacedSegment(one, where.first_action, where.first_token),
                    bootstrap_of=index if last else None,
                )
            )
    return tuple(training), tuple(for_values)
