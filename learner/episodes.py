"""The record of one finished episode, and what can be read off it. P prompt, L action tokens.

Knows no tensors and no run file: a few pure functions over the records that crossed the wire.
"""

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from capo.protocol.records import EpisodeEnd, EpisodeStatus, IntArray, Step


class Episode(Struct, frozen=True, kw_only=True):
    """All steps of one attempt at one task, in order, with its end.

    `group_id` and `member` are the lease's: group methods compare the members of a group.
    """

    episode_id: str
    task_id: str
    group_id: str
    member: int
    steps: tuple[Step, ...]
    end: EpisodeEnd

    @property
    def terminated(self) -> bool:
        return self.end.status is EpisodeStatus.TERMINATED


def prompts(episode: Episode) -> Iterator[IntArray]:
    """The full prompt of every step, int32 [P]; the final prompt comes last if the end has one.

    Raises ValueError where a `keep` reaches beyond the sequence that it refers to.
    """
    sequence = np.zeros(0, dtype=np.int32)
    for step in episode.steps:
        prompt = _extend(episode, f"step {step.index}", sequence, step.keep, step.observation)
        yield prompt
        sequence = np.concatenate([prompt, step.action])
    if episode.end.final_observation is not None:
        end = episode.end
        yield _extend(episode, "the end", sequence, end.final_keep, episode.end.final_observation)


def full_sequences(episode: Episode) -> Iterator[IntArray]:
    """Prompt and action of every step, int32 [P + L]."""
    for prompt, step in zip(prompts(episode), episode.steps, strict=False):
        yield np.concatenate([prompt, step.action])


def token_versions(step: Step) -> IntArray:
    """The policy version that sampled each action token, int32 [L]."""
    versions = np.repeat(
        np.array([span.version for span in step.versions], dtype=np.int32),
        np.array([span.num_tokens for span in step.versions], dtype=np.int64),
    )
    if len(versions) != len(step.action):
        raise ValueError(
            f"step {step.index} of episode {step.episode_id}: version spans cover "
            f"{len(versions)} tokens, but the action has {len(step.action)}"
        )
    return versions


def oldest_version(step: Step) -> int:
    """The oldest policy version that sampled a token of this action."""
    return min(span.version for span in step.versions)


def staleness(episode: Episode, version: int) -> int:
    """How many versions older than `version` the oldest token of the episode is."""
    if not episode.steps:
        return 0
    return version - min(oldest_version(step) for step in episode.steps)


def _extend(
    episode: Episode, where: str, sequence: IntArray, keep: int, observation: IntArray
) -> IntArray:
    if not 0 <= keep <= len(sequence):
        raise ValueError(
            f"{where} of episode {episode.episode_id} keeps {keep} tokens of a sequence of "
            f"{len(sequence)}"
        )
    prompt: IntArray = np.concatenate([sequence[:keep], observation]).astype(np.int32, copy=False)
    return prompt
