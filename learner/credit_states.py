"""Credit by comparing actions taken in equal states of a group: GiGPO, GAGPO, G2PO, HGPO.

K actions, episode by episode in time order; E episodes. An action's state is its observation's key
within its group; an empty key equals nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from capo.learner.credit_gae import discounted_returns, following_values, gae, is_last
from capo.learner.credit_groups import (
    FLAT_TOLERANCE,
    Comparison,
    dense_ids,
    group_means,
    standardised,
)


def state_ids(group_of_action: Tensor, state_keys: Sequence[str]) -> Tensor:
    """Equal (group, state) to equal numbers -> int64 [K]."""
    if len(state_keys) != len(group_of_action):
        raise ValueError(f"{len(state_keys)} state keys for {len(group_of_action)} actions.")
    return dense_ids(
        [
            (group, key) if key else (group, "", row)
            for row, (group, key) in enumerate(
                zip(group_of_action.tolist(), state_keys, strict=True)
            )
        ]
    )


def gigpo(
    rewards: Tensor,
    episode_of_action: Tensor,
    group_of_episode: Tensor,
    state_keys: Sequence[str],
    gamma: float,
    step_weight: float,
    divide_by_std: bool = True,
    by_action: bool = False,
) -> Comparison:
    """Episode comparison + step_weight * comparison of discounted returns-to-go among equal states
    (GiGPO, arXiv 2505.10978 eqs. 5-8). A state seen once gives no step term.

    `by_action`: the group's mean and std weight an episode by its number of actions.

    Returns: advantages [K].
    """
    group_of_action = group_of_episode[episode_of_action]
    scores = episode_scores(rewards, episode_of_action, len(group_of_episode))
    if by_action:
        episode = standardised(scores[episode_of_action], group_of_action, divide_by_std)
    else:
        per_episode = standardised(scores, group_of_episode, divide_by_std)
        episode = Comparison(*(column[episode_of_action] for column in per_episode))
    tails = torch.zeros_like(scores)
    returns = discounted_returns(rewards, episode_of_action, tails, gamma)
    step = standardised(
        returns, state_ids(group_of_action, state_keys), divide_by_std, raw_singletons=False
    )
    return Comparison(
        episode.advantages + step_weight * step.advantages, episode.contrast | step.contrast
    )


def gagpo(
    rewards: Tensor,
    episode_of_action: Tensor,
    group_of_episode: Tensor,
    state_keys: Sequence[str],
    gamma: float,
    lam: float,
    epsilon: float = 1e-6,
) -> Comparison:
    """GAE over a grouped value: V(s) = mean discounted return-to-go of the group's steps in state
    s; standardised over all steps of the group (GAGPO; reconstructed, ddof 1 and epsilon assumed).

    Returns: advantages [K].
    """
    group_of_action = group_of_episode[episode_of_action]
    tails = torch.zeros(len(group_of_episode), dtype=rewards.dtype)
    returns = discounted_returns(rewards, episode_of_action, tails, gamma)
    values = group_means(returns, state_ids(group_of_action, state_keys))
    raw = gae(rewards, values, episode_of_action, tails, gamma, lam).advantages
    return standardised(raw, group_of_action, raw_singletons=False, epsilon=epsilon)


def g2po(
    rewards: Tensor,
    episode_of_action: Tensor,
    group_of_episode: Tensor,
    state_keys: Sequence[str],
    gamma: float,
    step_weight: float,
    divide_by_std: bool = False,
    success_reward: float = 10.0,
    penalties: Tensor | None = None,
) -> Comparison:
    """Group-graph credit (G2PO): states are nodes, actions edges.

    Node value = mean over its visits of gamma^(T - t) R. Advantage = episode comparison (weighted
    by actions) + step_weight * (next-node value compared within the node + TD gain compared within
    the group). The node after a last action is worth `success_reward` where the episode's reward
    equals it, else 0.

    Args: penalties [K], subtracted from the next-node value (invalid actions).

    Returns: advantages [K].
    """
    group_of_action = group_of_episode[episode_of_action]
    scores = episode_scores(rewards, episode_of_action, len(group_of_episode))
    episode = standardised(scores[episode_of_action], group_of_action, divide_by_std)
    nodes = state_ids(group_of_action, state_keys)
    values = node_values(scores, episode_of_action, nodes, gamma)
    tails = torch.where(scores == success_reward, scores, 0.0)
    following = following_values(values, episode_of_action, tails)
    reached = following if penalties is None else following - penalties
    step = standardised(reached, nodes, divide_by_std, raw_singletons=False)
    gain = standardised(following - values, group_of_action, divide_by_std, raw_singletons=False)
    return Comparison(
        episode.advantages + step_weight * (step.advantages + gain.advantages),
        episode.contrast | step.contrast | gain.contrast,
    )


def node_values(scores: Tensor, episode_of_action: Tensor, nodes: Tensor, gamma: float) -> Tensor:
    """Mean over a node's visits of gamma^(steps left, the action's own included) R -> [K]."""
    steps_left = torch.ones(len(episode_of_action), dtype=scores.dtype)
    tails = torch.zeros(len(scores), dtype=scores.dtype)
    remaining = discounted_returns(steps_left, episode_of_action, tails, 1.0)
    return group_means(gamma**remaining * scores[episode_of_action], nodes)


def hgpo(
    returns: Tensor,
    episode_of_action: Tensor,
    group_of_episode: Tensor,
    state_keys: Sequence[str],
    history_length: int,
    power: float,
    divide_by_std: bool = True,
    epsilon: float = 1e-6,
) -> Comparison:
    """Hierarchy of groups (HGPO): actions in equal states whose last l observations are equal as
    well, l = 0..history_length; level l counts (l + 1)^power among the levels where the action's
    return is not its group's mean, whatever rounding says.

    Standard deviations are of the population (ddof 0), as in the code this was read from.

    Args: returns [K], discounted returns-to-go.

    Returns: advantages [K].
    """
    group_of_action = group_of_episode[episode_of_action]
    states = state_ids(group_of_action, state_keys).tolist()
    starts = torch.cat([torch.ones(1, dtype=torch.bool), is_last(episode_of_action)[:-1]]).tolist()
    position = 0
    positions = []
    for start in starts[: len(states)]:
        position = 0 if start else position + 1
        positions.append(position)
    total = torch.zeros_like(returns)
    weight_sum = torch.zeros_like(returns)
    for level in range(history_length + 1):
        keys: list[tuple[int | str, ...]] = [
            (states[row], *states[row - level : row]) if positions[row] >= level else ("alone", row)
            for row in range(len(states))
        ]
        ids = dense_ids(keys)
        centred = standardised(returns, ids, divide_by_std=False, raw_singletons=False)
        advantages = centred.advantages
        if divide_by_std:
            variances = group_means(advantages.square(), ids)
            advantages = advantages / (variances.sqrt() + epsilon)
        scale = group_means(returns.abs(), ids).clamp(min=1.0)
        speaks = centred.contrast & (centred.advantages.abs() > FLAT_TOLERANCE * scale)
        weight = (level + 1.0) ** power * speaks.to(returns)
        total += weight * advantages
        weight_sum += weight
    return Comparison(total / weight_sum.clamp(min=1e-300), weight_sum > 0)


def episode_scores(rewards: Tensor, episode_of_action: Tensor, num_episodes: int) -> Tensor:
    """Sum of an episode's rewards -> [E]."""
    return rewards.new_zeros(num_episodes).index_add(0, episode_of_action, rewards)
