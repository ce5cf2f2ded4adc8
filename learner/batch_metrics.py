"""Metrics of a batch before anything is computed from it: counts, outcomes, versions, prompts.

E episodes, K actions. Names: docs/metrics.md.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from capo.learner.batch import Batch
from capo.learner.episodes import Episode
from capo.protocol.records import EpisodeStatus


def batch_metrics(batch: Batch, version: int) -> dict[str, float]:
    """`version` of the learner that takes the batch."""
    episodes = batch.episodes
    returns = np.bincount(batch.episode_of_action, batch.rewards, minlength=len(episodes))
    segments = [one for placed in batch.segments for one in placed]
    tokens = sum(len(one.segment.token_ids) for one in segments)
    truncated = [episode.end.status is EpisodeStatus.TRUNCATED for episode in episodes]
    return {
        "batch/episodes": float(len(episodes)),
        "batch/actions": float(batch.num_actions),
        "batch/trained_tokens": float(batch.num_tokens),
        "batch/tokens": float(tokens),
        "batch/segments": float(len(segments)),
        "batch/return": float(returns.mean()),
        "batch/outcome": float(np.mean([episode.end.outcome for episode in episodes])),
        "batch/truncated": float(np.mean(truncated)),
        "batch/overlong": _counted(episodes, "overlong"),
        "batch/dropped_messages": _counted(episodes, "dropped_messages"),
        "batch/actions_per_episode": batch.num_actions / len(episodes),
        "batch/tokens_per_action": float(batch.lengths.mean()),
        **version_metrics(episodes, version),
    }


def version_metrics(episodes: Sequence[Episode], version: int) -> dict[str, float]:
    """How many versions wrote an action and an episode, and how many were made since an episode's
    last token; at least one of the episodes has an action."""
    written = [
        [{span.version for span in step.versions} for step in episode.steps]
        for episode in episodes
        if episode.steps
    ]
    of_episodes = [set[int]().union(*actions) for actions in written]
    return {
        **_mean_and_max(
            "staleness/versions_per_action",
            np.array([len(action) for actions in written for action in actions]),
        ),
        **_mean_and_max(
            "staleness/versions_per_episode", np.array([len(one) for one in of_episodes])
        ),
        **_mean_and_max(
            "queue/age_versions", np.array([version - max(one) for one in of_episodes])
        ),
    }


def _counted(episodes: Sequence[Episode], name: str) -> float:
    """What the actors counted, over all episodes; one that counts no such thing counts 0."""
    return float(sum(episode.end.metrics.get(name, 0.0) for episode in episodes))


def _mean_and_max(name: str, values: NDArray[np.int64]) -> dict[str, float]:
    return {f"{name}_mean": float(values.mean()), f"{name}_max": float(values.max())}
