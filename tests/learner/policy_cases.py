"""What tests of the policy's loss share: random actions, inputs of vectors, loss and gradient."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from capo.configs.algorithms import AlgorithmConfig
from capo.learner.behaviour import correct_behaviour
from capo.learner.objective import (
    PolicyLoss,
    Statistics,
    minibatch_statistics,
    policy_divisor,
    policy_loss,
)
from capo.learner.policy_inputs import PolicyInputs


def policy_inputs(
    action_of_token: Tensor,
    num_actions: int,
    proximal: Tensor,
    algorithm: AlgorithmConfig,
    *,
    advantages: Tensor | None = None,
    token_advantages: Tensor | None = None,
    behaviour: Tensor | None = None,
    reference: Tensor | None = None,
    entropies: Tensor | None = None,
    counted: Tensor | None = None,
) -> PolicyInputs:
    """Advantages per action or per token; the other view follows."""
    behaviour = proximal if behaviour is None else behaviour
    if advantages is None:
        assert token_advantages is not None
        counts = torch.bincount(action_of_token, minlength=num_actions).clamp(min=1)
        sums = torch.zeros(num_actions, dtype=proximal.dtype)
        advantages = sums.index_add(0, action_of_token, token_advantages) / counts
    if token_advantages is None:
        token_advantages = advantages[action_of_token]
    correction = correct_behaviour(proximal, behaviour, action_of_token, num_actions, algorithm)
    return PolicyInputs(
        action_of_token=action_of_token,
        proximal_logprobs=proximal,
        behaviour_logprobs=behaviour,
        reference_logprobs=proximal if reference is None else reference,
        entropies=entropies,
        advantages=advantages,
        token_advantages=token_advantages,
        token_weights=correction.token_weights,
        token_kept=correction.token_kept,
        action_weights=correction.action_weights,
        action_kept=correction.action_kept,
        counted=torch.ones(num_actions, dtype=torch.bool) if counted is None else counted,
    )


class Case:
    """K ragged actions with log-probs of four policies around each other."""

    def __init__(self, lengths: list[int], seed: int, scale: float = 0.02) -> None:
        generator = torch.Generator().manual_seed(seed)

        def noise(size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        self.lengths = lengths
        self.index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        self.proximal = -noise(sum(lengths)).abs() - 0.1
        self.current = self.proximal + scale * noise(sum(lengths))
        self.behaviour = self.proximal + 3 * scale * noise(sum(lengths))
        self.reference = self.proximal + scale * noise(sum(lengths))
        self.entropies = noise(sum(lengths)).abs()
        self.advantages = noise(len(lengths))
        self.token_advantages = noise(sum(lengths))

    def rows(self, values: Tensor) -> list[list[float]]:
        return [part.tolist() for part in values.split(self.lengths)]

    def inputs(self, algorithm: Any, **changes: Any) -> PolicyInputs:
        given: dict[str, Any] = {
            "advantages": self.advantages,
            "behaviour": self.behaviour,
            "reference": self.reference,
            "entropies": self.entropies,
        }
        return policy_inputs(
            self.index, len(self.lengths), self.proximal, algorithm, **{**given, **changes}
        )


def run(
    logprobs: Tensor,
    inputs: PolicyInputs,
    algorithm: AlgorithmConfig,
    parts: Sequence[Tensor] | None = None,
) -> tuple[float, Tensor, list[PolicyLoss], Statistics]:
    """Loss and its gradient [N], computed over `parts` (actions of each; one part by default)."""
    everyone = torch.arange(len(inputs.advantages))
    parts = [everyone] if parts is None else parts
    leaf = logprobs.detach().clone().requires_grad_()
    cut = [(_tokens(inputs, actions), inputs.select(actions)) for actions in parts]
    total = Statistics(torch.zeros(5, dtype=torch.float64))
    for tokens, part in cut:
        total = total + minibatch_statistics(leaf[tokens].detach(), part, algorithm)
    divisor = policy_divisor(total, algorithm)
    losses = [policy_loss(leaf[tokens], part, total, algorithm) for tokens, part in cut]
    for loss in losses:
        (loss.loss_sum / divisor).backward()
    assert leaf.grad is not None
    return sum(float(loss.loss_sum.detach()) for loss in losses) / divisor, leaf.grad, losses, total


def _tokens(inputs: PolicyInputs, actions: Tensor) -> Tensor:
    """The tokens of these actions, action by action."""
    return torch.cat(
        [torch.nonzero(inputs.action_of_token == action).squeeze(1) for action in actions.tolist()]
        or [torch.zeros(0, dtype=torch.int64)]
    )
