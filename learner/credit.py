"""From rewards and values to one advantage and one return per action: the batch's `Targets`.

E episodes, K actions, N trained tokens. Which rule applies is the algorithm's `credit`; the rules
themselves are the pure functions of the `credit_*` modules. Knows no model and no update.
"""

from collections.abc import Sequence

from msgspec import Struct
from torch import Tensor

from capo.configs.algorithms import AlgorithmConfig


class Experience(Struct, frozen=True, kw_only=True, eq=False):
    """What a whole batch gives to credit assignment. Actions stand episode by episode, in order.

    A fragment of an episode counts as an episode that was not terminated and whose bootstrap value
    is the critic's reading at the next boundary.
    """

    rewards: Tensor  # float [K]
    episode_of_action: Tensor  # int64 [K], non-decreasing, 0..E-1
    action_of_token: Tensor  # int64 [N], non-decreasing, 0..K-1
    terminated: Tensor  # bool [E]; False = truncated
    group_of_episode: Tensor | None = None  # int64 [E]; equal numbers = one group
    state_keys: Sequence[str] = ()  # [K]; "" compares equal to nothing
    values: Tensor | None = None  # float [K] at boundaries or [N] before tokens, see critic_reads
    bootstrap_values: Tensor | None = None  # float [E]; read only where not terminated
    log_weights: Tensor | None = None  # float [K], log(proximal / behaviour) per action


class Targets(Struct, frozen=True, kw_only=True, eq=False):
    """What the update learns from. Both views of the advantage always exist.

    Action-level credit repeats its advantage over the action's tokens; token-level credit shows an
    action the mean of its tokens. `returns` aligns with `Experience.values` ([K] or [N]) and is
    None without a critic. `counted` is False for actions that leave the batch altogether (their
    group had no contrast and the algorithm drops such groups).
    """

    advantages: Tensor  # float [K]
    token_advantages: Tensor  # float [N]
    returns: Tensor | None  # float [K] or [N]
    counted: Tensor  # bool [K]
    contrast: Tensor  # bool [K]: False where the action's group was a singleton or had no variance


def assign_credit(experience: Experience, algorithm: AlgorithmConfig) -> Targets:
    """Advantages and returns of a whole batch. Run it on float64 CPU tensors, once per batch."""
    raise NotImplementedError
