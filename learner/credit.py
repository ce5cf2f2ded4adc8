"""From rewards and values to one advantage and one return per action: the batch's `Targets`.

E episodes, K actions, N trained tokens. Which rule applies is the algorithm's `credit`; the rules
themselves are the pure functions of the `credit_*` modules. Knows no model and no update.
"""

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from capo.configs.algorithms import (
    AlgorithmConfig,
    critic_reads,
    needs_critic,
    needs_groups,
    needs_state_keys,
)
from capo.learner import credit_gae, credit_groups, credit_states
from capo.learner.credit_groups import Comparison
from capo.learner.ragged import action_means, check_rows, check_tokens


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
    _check(experience, algorithm)
    e, a = experience, algorithm
    if a.credit == "token_gae":
        return _token_critic(e, a)
    if a.credit == "reinforce_pp":
        return _token_returns(e, a)
    everyone = torch.ones_like(e.rewards, dtype=torch.bool)
    if needs_critic(a):
        credit = _action_critic(e, a)
        return _action_targets(e, a, Comparison(credit.advantages, everyone), credit.returns)
    return _action_targets(e, a, _compare(e, a), None)


def tails(experience: Experience, bootstrap_truncated: bool) -> Tensor:
    """The value after each episode's last action -> [E]: 0 after a termination; the bootstrap value
    after a truncation (the paper: 0 there as well, `bootstrap_truncated` False)."""
    nothing = torch.zeros(len(experience.terminated), dtype=experience.rewards.dtype)
    if not bootstrap_truncated or bool(experience.terminated.all()):
        return nothing
    if experience.bootstrap_values is None:
        raise ValueError("A truncated episode needs a bootstrap value, got none.")
    return torch.where(experience.terminated, 0.0, experience.bootstrap_values.to(nothing))


def _action_critic(e: Experience, a: AlgorithmConfig) -> credit_gae.Credit:
    assert e.values is not None
    after = tails(e, a.bootstrap_truncated)
    if a.credit == "action_gae":
        return credit_gae.gae(e.rewards, e.values, e.episode_of_action, after, a.gamma, a.lam)
    if e.log_weights is None:
        raise ValueError(f"Credit {a.credit!r} needs log-weights per action, got None.")
    common = (e.rewards, e.values, e.log_weights, e.episode_of_action, after, a.gamma)
    if a.credit == "vtrace":
        return credit_gae.vtrace(*common, a.lam, a.trace_rho_cap, a.trace_c_cap)
    return credit_gae.brace(*common, a.trace_rho_cap, a.trace_c_cap, a.trace_steps)


def _compare(e: Experience, a: AlgorithmConfig) -> Comparison:
    assert e.group_of_episode is not None
    states = (e.rewards, e.episode_of_action, e.group_of_episode, e.state_keys)
    if a.credit == "gigpo":
        by_action = a.group_weighting == "action"
        return credit_states.gigpo(*states, a.gamma, a.step_weight, a.group_std, by_action)
    if a.credit == "gagpo":
        return credit_states.gagpo(*states, a.gamma, a.lam)
    if a.credit == "g2po":
        return credit_states.g2po(*states, a.gamma, a.step_weight, a.group_std, a.success_reward)
    if a.credit == "hgpo":
        no_tails = torch.zeros(len(e.terminated), dtype=e.rewards.dtype)
        returns = credit_gae.discounted_returns(e.rewards, e.episode_of_action, no_tails, a.gamma)
        return credit_states.hgpo(
            returns, *states[1:], a.history_length, a.history_power, a.group_std
        )
    scores = credit_states.episode_scores(e.rewards, e.episode_of_action, len(e.terminated))
    if a.credit == "rloo":
        compared = credit_groups.leave_one_out(scores, e.group_of_episode)
    else:
        compared = credit_groups.standardised(scores, e.group_of_episode, a.group_std)
    return Comparison(*(column[e.episode_of_action] for column in compared))


def _action_targets(
    e: Experience, a: AlgorithmConfig, compared: Comparison, returns: Tensor | None
) -> Targets:
    counted = compared.contrast if a.drop_flat_groups else torch.ones_like(compared.contrast)
    advantages = compared.advantages
    if a.whiten == "action":
        advantages = advantages.clone()
        advantages[counted] = credit_groups.whitened(advantages[counted], inside_root=False)
    token_advantages = advantages[e.action_of_token]
    if a.whiten == "token":
        kept = counted[e.action_of_token]
        token_advantages[kept] = credit_groups.whitened(token_advantages[kept])
        advantages = action_means(token_advantages, e.action_of_token, len(advantages))
    return Targets(
        advantages=advantages,
        token_advantages=token_advantages,
        returns=returns,
        counted=counted,
        contrast=compared.contrast,
    )


def _token_critic(e: Experience, a: AlgorithmConfig) -> Targets:
    """GAE over the episode's tokens across actions; a reward sits on its action's last token."""
    assert e.values is not None
    credit = credit_gae.gae(
        rewards_on_tokens(e.rewards, e.action_of_token),
        e.values,
        e.episode_of_action[e.action_of_token],
        tails(e, a.bootstrap_truncated),
        a.gamma,
        a.lam,
    )
    everyone = torch.ones_like(e.rewards, dtype=torch.bool)
    return _token_targets(e, a, credit.advantages, credit.returns, everyone)


def _token_returns(e: Experience, a: AlgorithmConfig) -> Targets:
    """REINFORCE++ (arXiv 2501.03262): discounted return over all later tokens of the episode, minus
    the group's mean score."""
    assert e.group_of_episode is not None
    returns = credit_gae.discounted_returns(
        rewards_on_tokens(e.rewards, e.action_of_token),
        e.episode_of_action[e.action_of_token],
        torch.zeros(len(e.terminated), dtype=e.rewards.dtype),
        a.gamma,
    )
    scores = credit_states.episode_scores(e.rewards, e.episode_of_action, len(e.terminated))
    baselines = scores - credit_groups.standardised(scores, e.group_of_episode, False).advantages
    contrast = credit_groups.standardised(scores, e.group_of_episode).contrast
    advantages = returns - baselines[e.episode_of_action][e.action_of_token]
    return _token_targets(e, a, advantages, None, contrast[e.episode_of_action])


def _token_targets(
    e: Experience, a: AlgorithmConfig, raw: Tensor, returns: Tensor | None, contrast: Tensor
) -> Targets:
    counted = contrast if a.drop_flat_groups else torch.ones_like(contrast)
    advantages = raw
    if a.whiten == "token":
        advantages = raw.clone()
        kept = counted[e.action_of_token]
        advantages[kept] = credit_groups.whitened(raw[kept])
    per_action = action_means(advantages, e.action_of_token, len(e.rewards))
    if a.whiten == "action":
        per_action[counted] = credit_groups.whitened(per_action[counted], inside_root=False)
        advantages = per_action[e.action_of_token]
    return Targets(
        advantages=per_action,
        token_advantages=advantages,
        returns=returns,
        counted=counted,
        contrast=contrast,
    )


def rewards_on_tokens(rewards: Tensor, action_of_token: Tensor) -> Tensor:
    """Each action's reward on the last of its tokens, 0 elsewhere -> [N]."""
    return torch.where(credit_gae.is_last(action_of_token), rewards[action_of_token], 0.0)


def _check(e: Experience, a: AlgorithmConfig) -> None:
    num_actions, num_episodes = len(e.rewards), len(e.terminated)
    check_rows(num_actions, "actions", e.rewards, e.episode_of_action)
    check_tokens(e.action_of_token)
    if num_actions and int(e.episode_of_action.max()) >= num_episodes:
        raise ValueError(
            f"episode_of_action names episode {int(e.episode_of_action.max())}, but there are only"
            f" {num_episodes} episodes."
        )
    if needs_groups(a):
        if e.group_of_episode is None:
            raise ValueError(f"Credit {a.credit!r} compares groups, but no group ids were given.")
        check_rows(num_episodes, "episodes", e.group_of_episode)
    if needs_critic(a):
        if e.values is None:
            raise ValueError(f"Credit {a.credit!r} needs the critic's values, got None.")
        if critic_reads(a) == "token":
            check_tokens(e.action_of_token, e.values)
        else:
            check_rows(num_actions, "actions", e.values)
    if needs_state_keys(a) and len(e.state_keys) != num_actions:
        raise ValueError(f"{len(e.state_keys)} state keys for {num_actions} actions.")
