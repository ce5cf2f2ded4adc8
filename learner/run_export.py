"""`capo export`: a run's episodes as JSON lines, one per ended episode with its tokens."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from capo.learner.run_database import damaged
from capo.learner.run_reader import RunReader
from capo.protocol.records import Step


def export_lines(run_dir: Path) -> Iterator[bytes]:
    """JSON objects without line ends, in the order in which the episodes were committed.

    The prompt of a step is the first `keep` tokens of the step before (its prompt and its action),
    then `observation`. `versions` are pairs of policy version and number of action tokens.
    """
    with RunReader(run_dir) as reader:
        leases = {lease.episode_id: lease for lease in reader.leases()}
        for row in reader.episodes():
            [episode] = reader.read_episodes([row.episode_id])
            lease = leases.get(row.episode_id)
            if lease is None:
                raise damaged(reader.path, f"episode {row.episode_id} has no lease")
            yield msgspec.json.encode(
                {
                    "episode_id": row.episode_id,
                    "task_id": lease.task_id,
                    "group_id": lease.group_id,
                    "member": lease.member,
                    "attempt": row.attempt,
                    "purpose": row.purpose,
                    "seed": lease.seed,
                    "actor_id": row.actor_id,
                    "status": row.status,
                    "outcome": row.outcome,
                    "return": row.episode_return,
                    "excluded": row.excluded,
                    "consumed_by": row.consumed_by,
                    "error": row.error,
                    "metrics": episode.end.metrics,
                    "final_keep": episode.end.final_keep,
                    "final_observation": _list(episode.end.final_observation),
                    "steps": [_step(step) for step in episode.steps],
                }
            )


def _step(step: Step) -> dict[str, object]:
    return {
        "keep": step.keep,
        "observation": _list(step.observation),
        "action": _list(step.action),
        "behaviour_logprobs": _list(step.behaviour_logprobs),
        "entropies": _list(step.entropies),
        "versions": step.versions,
        "reward": step.reward,
        "state_key": step.state_key,
        "info": step.info,
    }


def _list(array: NDArray[np.generic] | None) -> list[object] | None:
    return None if array is None else list(array.tolist())
