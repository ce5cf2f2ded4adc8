"""Pure parts of CAPO's relatives that need more than this data path carries yet.

Their missing inputs (a tracker across updates, a reference over prefixes, a hindsight pass, a
judge) are named in docs/algorithms.md; no preset uses them so far. K actions, N tokens.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from capo.learner.ragged import action_sums, check_rows, check_tokens

TRIAGE_BONUS: Mapping[str, float] = {
    "decisive": 1.0,
    "useful": 0.5,
    "neutral": -0.1,
    "harmful": -0.5,
}


def token_weighted_standardised(
    advantages: Tensor, lengths: Tensor, epsilon: float = 1e-8
) -> Tensor:
    """SPO++: standardise K advantages as if each stood on every token of its action -> [K]."""
    check_rows(advantages.shape[0], "actions", lengths)
    total = lengths.sum()
    centred = advantages - (lengths * advantages).sum() / total
    variance = (lengths * centred.square()).sum() / (total - 1).clamp(min=1)
    return centred / (variance.sqrt() + epsilon)


def trace_advantages(
    answer_logprobs: Tensor,
    outcome_advantage: float,
    gamma: float,
    window: int,
    weight: float,
    terminal_factor: float,
    offset: float = 0.1,
) -> Tensor:
    """TRACE: A_t = A + weight * windowed mean of the gains in a log-ratio state value (window and
    filling beyond the end are reconstructed).

    V_j = -log((offset - l_j) / (offset - l_0)) for l_j = log-prob of the gold answer after j steps;
    gains V_{t+1} - V_t; beyond the end each gain counts terminal_factor * A.

    Args: answer_logprobs [T + 1], non-positive.

    Returns: [T].
    """
    values = -((offset - answer_logprobs) / (offset - answer_logprobs[0])).log()
    beyond = values.new_full((window - 1,), terminal_factor * outcome_advantage)
    gains = torch.cat([values.diff(), beyond])
    discounts = gamma ** torch.arange(window).to(values)
    traces = gains.unfold(0, window, 1) @ discounts / discounts.sum()
    return outcome_advantage + weight * traces


def hindsight_weights(
    logprobs: Tensor,
    hindsight_logprobs: Tensor,
    action_of_token: Tensor,
    num_actions: int,
    limit: float,
) -> Tensor:
    """TRIAL: an action counts by its mean |log-prob gap under hindsight|, clipped to +-limit, over
    the mean of all tokens -> [K]; the token-weighted mean of the weights is 1.

    For coverage controls, ones and a permutation of these weights spread the same credit.
    """
    check_tokens(action_of_token, logprobs, hindsight_logprobs)
    gaps = (hindsight_logprobs - logprobs).clamp(-limit, limit).abs()
    lengths = action_sums(torch.ones_like(gaps), action_of_token, num_actions)
    means = action_sums(gaps, action_of_token, num_actions) / lengths.clamp(min=1)
    return means / gaps.mean() if bool(gaps.sum() > 0) else torch.ones_like(means)


def with_role_bonus(advantages: Tensor, roles: Sequence[str], weight: float) -> Tensor:
    """TRIAGE: A + weight * bonus of the role that a judge gave the action -> [K]."""
    unknown = sorted(set(roles) - set(TRIAGE_BONUS))
    if unknown:
        raise ValueError(f"Unknown role {unknown[0]!r}; known are {', '.join(TRIAGE_BONUS)}.")
    bonus = torch.tensor([TRIAGE_BONUS[role] for role in roles], dtype=advantages.dtype)
    check_rows(advantages.shape[0], "actions", bonus)
    return advantages + weight * bonus
