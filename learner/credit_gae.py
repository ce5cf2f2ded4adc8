"""Temporal-difference credit along an episode, with a critic: GAE, V-trace, BRACE.

T steps, each an action or a token, lying sequence by sequence in time order; E sequences.
`rewards[t]` and `values[t]` belong to the same step, the value read before the step was taken.
`tails[e]` is the value after a sequence's last step: 0 where it terminated, the critic's reading of
the final observation where it was truncated.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from capo.learner.ragged import check_rows


class Credit(NamedTuple):
    advantages: Tensor  # [T]
    returns: Tensor  # [T], the critic's targets


def gae(
    rewards: Tensor,
    values: Tensor,
    sequence_of_step: Tensor,
    tails: Tensor,
    gamma: float,
    lam: float,
) -> Credit:
    """Generalised advantage estimation (arXiv 1506.02438 eq. 16; CAPO, arXiv 2604.18401 eq. 2).

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lambda A_{t+1}; return A_t + V_t.
    """
    following = following_values(values, sequence_of_step, tails)
    deltas = td_errors(rewards, values, following, gamma)
    advantages = backward_scan(deltas, _inner(gamma * lam, sequence_of_step, values))
    return Credit(advantages, advantages + values)


def discounted_returns(
    rewards: Tensor, sequence_of_step: Tensor, tails: Tensor, gamma: float
) -> Tensor:
    """G_t = r_t + gamma G_{t+1}, starting from the tail -> [T]."""
    check_rows(sequence_of_step.shape[0], "steps", rewards)
    last = is_last(sequence_of_step)
    first_terms = torch.where(last, rewards + gamma * tails[sequence_of_step], rewards)
    return backward_scan(first_terms, _inner(gamma, sequence_of_step, rewards))


def vtrace(
    rewards: Tensor,
    values: Tensor,
    log_weights: Tensor,
    sequence_of_step: Tensor,
    tails: Tensor,
    gamma: float,
    lam: float,
    rho_cap: float,
    c_cap: float,
) -> Credit:
    """V-trace (arXiv 1802.01561 eq. 1) with w = target / behaviour probability of each step.

    rho = min(rho_cap, w), c = lambda min(c_cap, w);
    v_t = V_t + rho_t delta_t + gamma c_t (v_{t+1} - V_{t+1}); A_t = r_t + gamma v_{t+1} - V_t.
    A_t carries no weight of its own: the objective corrects for the sampling policy.
    """
    following = following_values(values, sequence_of_step, tails)
    weights = _step_weights(log_weights, values)
    corrections = backward_scan(
        weights.clamp(max=rho_cap) * td_errors(rewards, values, following, gamma),
        _inner(gamma * lam, sequence_of_step, values) * weights.clamp(max=c_cap),
    )
    targets = values + corrections
    after = following_values(targets, sequence_of_step, tails)
    return Credit(td_errors(rewards, values, after, gamma), targets)


def brace(
    rewards: Tensor,
    values: Tensor,
    log_weights: Tensor,
    sequence_of_step: Tensor,
    tails: Tensor,
    gamma: float,
    rho_cap: float,
    c_cap: float,
    num_steps: int,
) -> Credit:
    """Anchored targets (BRACE, arXiv 2609.09783, in steps): `num_steps` V-trace corrections, then
    the Monte-Carlo return.

    b_0 = G; b_k(t) = V_t + rho_t delta_t + gamma c_t (b_{k-1}(t+1) - V_{t+1}); the target is b at
    k = num_steps and A_t = r_t + gamma b_k(t+1) - V_t. 0 steps are Monte Carlo, as many as the
    sequence is long are V-trace with lambda 1.
    """
    following = following_values(values, sequence_of_step, tails)
    weights = _step_weights(log_weights, values)
    corrections = weights.clamp(max=rho_cap) * td_errors(rewards, values, following, gamma)
    traces = gamma * weights.clamp(max=c_cap)
    targets = discounted_returns(rewards, sequence_of_step, tails, gamma)
    longest = int(torch.bincount(sequence_of_step).max()) if len(sequence_of_step) else 0
    for _ in range(min(num_steps, longest)):
        after = following_values(targets, sequence_of_step, tails)
        targets = values + corrections + traces * (after - following)
    after = following_values(targets, sequence_of_step, tails)
    return Credit(td_errors(rewards, values, after, gamma), targets)


def td_errors(rewards: Tensor, values: Tensor, following: Tensor, gamma: float) -> Tensor:
    """r_t + gamma V'_{t+1} - V_t -> [T], with `following` [T] the V'_{t+1}."""
    return rewards + gamma * following - values


def following_values(values: Tensor, sequence_of_step: Tensor, tails: Tensor) -> Tensor:
    """The value one step later -> [T]; a sequence's tail after its last step."""
    check_rows(sequence_of_step.shape[0], "steps", values)
    last = is_last(sequence_of_step)
    return torch.where(last, tails[sequence_of_step].to(values), values.roll(-1))


def is_last(sequence_of_step: Tensor) -> Tensor:
    """Whether a step is its sequence's last -> bool [T]."""
    if sequence_of_step.numel() and bool((sequence_of_step.diff() < 0).any()):
        raise ValueError("Steps must lie sequence by sequence; sequence_of_step decreases.")
    last = torch.ones_like(sequence_of_step, dtype=torch.bool)
    last[:-1] = sequence_of_step.diff() > 0
    return last


def backward_scan(terms: Tensor, decays: Tensor) -> Tensor:
    """x_t = terms_t + decays_t x_{t+1} from the end -> [T]; a decay of 0 keeps the
    sequence after this step out."""
    carry = 0.0
    found = []
    for term, decay in zip(reversed(terms.tolist()), reversed(decays.tolist()), strict=True):
        carry = term + decay * carry
        found.append(carry)
    return torch.tensor(found[::-1], dtype=terms.dtype, device=terms.device)


def _inner(decay: float, sequence_of_step: Tensor, like: Tensor) -> Tensor:
    return torch.where(is_last(sequence_of_step), 0.0, torch.full_like(like, decay))


def _step_weights(log_weights: Tensor, values: Tensor) -> Tensor:
    check_rows(values.shape[0], "steps", log_weights)
    return log_weights.detach().clamp(-20.0, 20.0).to(values).exp()
