"""How far the policy that sampled an action is from the proximal one, as detached weights and masks.

N tokens, K actions. All of it is frozen before the first optimizer step of a batch.
"""

from msgspec import Struct
from torch import Tensor

from capo.configs.algorithms import AlgorithmConfig


class Correction(Struct, frozen=True, kw_only=True, eq=False):
    """Weights multiply the objective after clipping; what is not kept contributes nothing to it,
    but stays in the divisor."""

    token_weights: Tensor  # float [N], 1 where the weight is per action
    token_kept: Tensor  # bool [N]
    action_weights: Tensor  # float [K], 1 where the weight is per token
    action_kept: Tensor  # bool [K]
    log_weights: Tensor  # float [K], log(proximal / behaviour) per action, before any truncation
    truncated: Tensor  # bool [K]: the action, or one of its tokens, met the cap


def correct_behaviour(
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    action_of_token: Tensor,
    num_actions: int,
    algorithm: AlgorithmConfig,
    entropies: Tensor | None = None,
) -> Correction:
    """The whole batch at once: `*_logprobs [N]`, `entropies [N]` of the behaviour policy."""
    raise NotImplementedError
