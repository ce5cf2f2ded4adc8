"""What tests of the policy's loss share: inputs from plain vectors, loss and gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor

from capo.configs.algorithms import AlgorithmConfig
from capo.learner.behaviour import correct_behaviour
from capo.learner.objective import (
    PolicyInputs,
    PolicyLoss,
    Statistics,
    minibatch_statistics,
    policy_divisor,
    policy_loss,
)


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
