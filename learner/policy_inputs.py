"""The frozen side of the policy's loss, and how a part of it is cut out.

N tokens, K actions.
"""

import torch
from msgspec import Struct
from torch import Tensor


class PolicyInputs(Struct, frozen=True, kw_only=True, eq=False):
    """Everything the policy's loss needs except the current log-probs: frozen for a batch."""

    action_of_token: Tensor  # int64 [N], 0..K-1
    proximal_logprobs: Tensor  # float [N]
    behaviour_logprobs: Tensor  # float [N]
    reference_logprobs: Tensor | None = None  # float [N], None without a KL term
    entropies: Tensor | None = None  # float [N] of the behaviour policy, None unless needed
    advantages: Tensor  # float [K]
    token_advantages: Tensor  # float [N]
    token_weights: Tensor  # float [N]
    token_kept: Tensor  # bool [N]
    action_weights: Tensor  # float [K]
    action_kept: Tensor  # bool [K]
    counted: Tensor  # bool [K]

    def select(self, actions: Tensor) -> "PolicyInputs":
        """The part of these actions (int64, in this order), renumbered from 0; an action's tokens
        keep their order."""
        position = torch.full_like(self.counted, -1, dtype=torch.int64)
        position[actions] = torch.arange(len(actions), device=actions.device)
        owner = position[self.action_of_token]
        tokens = torch.nonzero(owner >= 0).squeeze(1)
        tokens = tokens[owner[tokens].argsort(stable=True)]
        return PolicyInputs(
            action_of_token=owner[tokens],
            proximal_logprobs=self.proximal_logprobs[tokens],
            behaviour_logprobs=self.behaviour_logprobs[tokens],
            reference_logprobs=_pick(self.reference_logprobs, tokens),
            entropies=_pick(self.entropies, tokens),
            advantages=self.advantages[actions],
            token_advantages=self.token_advantages[tokens],
            token_weights=self.token_weights[tokens],
            token_kept=self.token_kept[tokens],
            action_weights=self.action_weights[actions],
            action_kept=self.action_kept[actions],
            counted=self.counted[actions],
        )


def _pick(vector: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if vector is None else vector[rows]
