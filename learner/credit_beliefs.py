"""AgentOPSD: credit from how a teacher with privileged context moves the belief in success.

K actions, episode by episode in time order; E episodes. Needs a teacher pass that the learner does
not make yet; no preset uses it so far.
"""

import torch
from torch import Tensor

from capo.learner.credit_gae import backward_scan, is_last
from capo.learner.credit_groups import group_means

PRIOR_LIMIT = 1e-4
EPSILON = 1e-6


def prior_success(scores: Tensor, group_of_episode: Tensor) -> Tensor:
    """The group's mean score, kept off 0 and 1 -> [E]."""
    return group_means(scores, group_of_episode).clamp(PRIOR_LIMIT, 1.0 - PRIOR_LIMIT)


def belief_steps(
    evidence: Tensor,
    episode_of_action: Tensor,
    priors: Tensor,
    centre: bool = False,
    decay: float = 1.0,
) -> Tensor:
    """V_k - V_{k-1} of logit V_k = logit V_{-1} + c_k, c_k = evidence_k + decay c_{k-1} -> [K].

    Args:
        evidence: [K], sum over an action's tokens of log teacher - log student.
        priors: [E], V_{-1}.
        centre: remove each episode's mean evidence first (of episodes with several actions).
    """
    if centre:
        several = torch.bincount(episode_of_action)[episode_of_action] > 1
        evidence = evidence - torch.where(several, group_means(evidence, episode_of_action), 0.0)
    first = is_last(episode_of_action).roll(1)
    decays = torch.where(first, 0.0, torch.full_like(evidence, decay))
    running = backward_scan(evidence.flip(0), decays.flip(0)).flip(0)
    logits = torch.logit(priors)[episode_of_action] + running
    beliefs = logits.sigmoid().clamp(EPSILON, 1.0 - EPSILON)
    return beliefs - torch.where(first, priors[episode_of_action], beliefs.roll(1))


def telescoped(steps: Tensor, episode_of_action: Tensor, priors: Tensor, scores: Tensor) -> Tensor:
    """Steps scaled so that an episode's sum is its score minus its prior; 0 where they cancel."""
    sums = torch.zeros_like(priors).index_add(0, episode_of_action, steps)
    cancels = sums.abs() <= EPSILON
    scale = torch.where(cancels, 0.0, (scores - priors) / torch.where(cancels, 1.0, sums))
    return steps * scale[episode_of_action]


def anchored(steps: Tensor, outcome_advantages: Tensor, group_of_action: Tensor) -> Tensor:
    """Sizes from the beliefs, signs from the outcome, standardised within the group -> [K]."""
    signed = outcome_advantages.sign() * steps.abs()
    centred = signed - group_means(signed, group_of_action)
    spread = group_means(centred.square(), group_of_action).sqrt()
    return centred / (spread + EPSILON)


def multiplied(
    steps: Tensor,
    outcome_advantages: Tensor,
    episode_of_action: Tensor,
    band: float,
    mix: float,
    signed: bool,
) -> Tensor:
    """The outcome's advantage times a factor within 1 +- band that favours the episode's telling
    actions: by the size of their belief step, or (`signed`) by its agreement with the outcome."""
    told = steps if signed else steps.abs()
    centred = told - group_means(told, episode_of_action)
    spread = group_means(centred.square(), episode_of_action).sqrt()
    score = centred / (spread + EPSILON)
    direction = outcome_advantages.sign() if signed else 1.0
    factor = (1.0 + band * direction * score).clamp(1.0 - band, 1.0 + band)
    return outcome_advantages * ((1.0 - mix) + mix * factor)


def tethered(mean_evidence: Tensor, outcome_advantages: Tensor, band: float, mix: float) -> Tensor:
    """The outcome's advantage nudged by exp(sign(A) * mean evidence per token) within 1 +- band."""
    factor = (outcome_advantages.sign() * mean_evidence).exp().clamp(1.0 - band, 1.0 + band)
    return outcome_advantages * ((1.0 - mix) + mix * factor)
