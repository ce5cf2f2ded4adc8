"""Steps to training sequences, so that every action token is trained exactly once. T tokens.

A step whose prompt extends the previous full sequence exactly continues that segment; any other
step starts a new one. Knows no budget, no batch and no tensors.
"""

import numpy as np
from msgspec import Struct

from capo.learner.episodes import Episode, prompts
from capo.protocol.records import EpisodeStatus, IntArray


class ActionSpan(Struct, frozen=True):
    """Where the action of the episode's `step`-th step lies: tokens `start` to `end`."""

    step: int
    start: int
    end: int

    @property
    def boundary(self) -> int:
        """The last prompt token before the action: where its value is read."""
        return self.start - 1


class Segment(Struct, frozen=True):
    """One sequence as the policy saw it. Tokens outside the spans are context, never trained."""

    token_ids: IntArray  # int32 [T]
    actions: tuple[ActionSpan, ...]


def segment(episode: Episode) -> tuple[Segment, ...]:
    """The training segments of an episode, in the order of its steps.

    Raises ValueError for an action without tokens or without a prompt, and for a `keep` that
    reaches beyond the previous sequence.
    """
    segments: list[Segment] = []
    sequence = np.zeros(0, dtype=np.int32)
    spans: list[ActionSpan] = []
    for position, (step, prompt) in enumerate(zip(episode.steps, prompts(episode), strict=False)):
        if len(prompt) == 0 or len(step.action) == 0:
            raise ValueError(
                f"step {step.index} of episode {episode.episode_id} has {len(prompt)} prompt and "
                f"{len(step.action)} action tokens; both need at least one"
            )
        if spans and step.keep != len(sequence):
            segments.append(Segment(sequence, tuple(spans)))
            spans = []
        sequence = np.concatenate([prompt, step.action])
        spans.append(ActionSpan(position, len(prompt), len(sequence)))
    if spans:
        segments.append(Segment(sequence, tuple(spans)))
    return tuple(segments)


class ValueSegments(Struct, frozen=True):
    """What the critic reads: the training segments, and where the bootstrap value is.

    The bootstrap of a truncated episode is the value of its final prompt's last token, which is
    the last token of the last segment here.
    """

    segments: tuple[Segment, ...]
    has_bootstrap: bool


def value_segments(episode: Episode, segments: tuple[Segment, ...]) -> ValueSegments:
    """`segments`, with the final prompt of a truncated episode appended for its bootstrap.

    If the final prompt extends the last segment exactly, that segment grows; otherwise the prompt
    is a segment of its own, without actions. An episode without any action needs no bootstrap.
    Raises ValueError for a truncated episode without a final prompt.
    """
    if episode.end.status is not EpisodeStatus.TRUNCATED or not segments:
        return ValueSegments(segments, has_bootstrap=False)
    if episode.end.final_observation is None:
        raise ValueError(
            f"episode {episode.episode_id} was truncated but carries no final observation, so "
            "there is nothing to bootstrap from"
        )
    *_, final_prompt = prompts(episode)
    if len(final_prompt) == 0:
        raise ValueError(f"episode {episode.episode_id} was truncated with an empty final prompt")
    if episode.end.final_keep == len(segments[-1].token_ids):
        grown = Segment(final_prompt, segments[-1].actions)
        return ValueSegments((*segments[:-1], grown), has_bootstrap=True)
    return ValueSegments((*segments, Segment(final_prompt, ())), has_bootstrap=True)
