"""The records that cross the wire and lie in the run file. P prompt tokens, L action tokens.

Records are frozen; arrays inside them are read-only by convention (they may view a network frame).
"""

from enum import StrEnum

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


class VersionSpan(Struct, frozen=True, array_like=True):
    """`num_tokens` consecutive action tokens that were sampled under policy `version`."""

    version: int
    num_tokens: int


class Step(Struct, frozen=True, kw_only=True):
    """One transition: the policy read a prompt, sampled an action, the environment answered.

    The full sequence of a step is its prompt followed by its action. `keep` is how many leading
    tokens of the previous step's full sequence this step's prompt starts with (0 for the first
    step); `observation` are the prompt tokens that follow. An append-only dialogue keeps all of it;
    a prompt that is rebuilt keeps the common prefix. `action` holds sampled tokens only, the stop
    token included when it was sampled.
    """

    episode_id: str
    index: int
    keep: int
    observation: IntArray  # int32 [P - keep]
    action: IntArray  # int32 [L]
    behaviour_logprobs: FloatArray  # float32 [L], at the sampling temperature
    versions: tuple[VersionSpan, ...]  # covers the L action tokens in order
    reward: float
    entropies: FloatArray | None = None  # float32 [L], of the behaviour policy, if recorded
    state_key: str = ""  # equal for equal states of a task; some credit methods group by it
    info: dict[str, float] = {}


class EpisodeStatus(StrEnum):
    """How an episode ended. Only the first two are training data."""

    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    ENV_ERROR = "env_error"
    ENGINE_ERROR = "engine_error"
    LOST = "lost"


class EpisodeEnd(Struct, frozen=True, kw_only=True):
    """The end of an episode. A truncated one carries the final prompt for the bootstrap value.

    `final_keep` and `final_observation` mean the same as in `Step`, for the prompt that the policy
    would have read next.
    """

    episode_id: str
    status: EpisodeStatus
    num_steps: int
    outcome: float = 0.0  # the environment's own verdict, 1.0 = success
    final_keep: int = 0
    final_observation: IntArray | None = None  # int32, None unless truncated
    metrics: dict[str, float] = {}
    error: str = ""


class Task(Struct, frozen=True):
    """One thing to play. `payload` is all an environment needs to build it, on any machine."""

    id: str
    payload: bytes


class Purpose(StrEnum):
    """What an episode is for: training data, or an evaluation by sampling or by argmax."""

    TRAIN = "train"
    EVAL_SAMPLED = "eval_sampled"
    EVAL_GREEDY = "eval_greedy"


class Lease(Struct, frozen=True, kw_only=True):
    """What an actor was asked to play. Its episode is named by lease and attempt."""

    lease_id: str
    attempt: int
    task: Task
    group_id: str
    member: int
    purpose: Purpose
    seed: int
    policy_version: int  # the learner's version when the lease was granted

    @property
    def episode_id(self) -> str:
        return f"{self.lease_id}.{self.attempt}"


class TensorSpec(Struct, frozen=True, array_like=True):
    """Name, torch dtype name ("float32") and shape of one weight, in broadcast order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
