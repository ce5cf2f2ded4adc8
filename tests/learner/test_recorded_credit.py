"""Credit assignment against the recorded cases 01-05, 14, 15, 20, 21, 23 and 24."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capo.configs.algorithms import resolve
from capo.learner import credit_gae, credit_groups, credit_states
from capo.learner.credit import Experience, assign_credit
from tests.recorded import FP32, Rows, cases, close, numbered, vector


@pytest.mark.parametrize("case", cases("01"))
def test_token_gae(case: dict[str, Any]) -> None:
    given, expected = case["inputs"], case["outputs"]
    rows = Rows(given["response_mask"])
    credit = credit_gae.gae(
        rows.flat(given["token_level_rewards"]),
        rows.flat(given["values"]),
        rows.action_of_token,
        torch.zeros(rows.num_actions, dtype=torch.float64),
        case["params"]["gamma"],
        case["params"]["lam"],
    )
    close(credit.advantages, rows.flat(expected["advantages_raw"]))
    close(credit.returns, rows.flat(expected["returns"]))
    whitened = credit_groups.whitened(credit.advantages)
    # The recording's masked mean divides by n + 1e-8.
    close(whitened, rows.flat(expected["advantages_whitened"]), rtol=5e-8, atol=5e-8)


@pytest.mark.parametrize("case", cases("02"))
def test_group_outcomes(case: dict[str, Any]) -> None:
    given, expected = case["inputs"], case["outputs"]
    rows = Rows(given["response_mask"])
    scores = torch.tensor(given["token_level_rewards"], dtype=torch.float64).sum(dim=1)
    groups = numbered(given["index"])
    alone = torch.bincount(groups)[groups] == 1
    found = _outcomes(scores, groups)
    found["grpo_vectorized"] = credit_groups.standardised(
        scores, groups, raw_singletons=False
    ).advantages
    found["opo"] = credit_groups.standardised(
        scores, groups, divide_by_std=False, weights=rows.lengths
    ).advantages
    for name in ("grpo_std", "grpo_nostd", "grpo_vectorized", "rloo_vectorized", "opo"):
        close(found[name], rows.first(expected[name]), **FP32)
    # The loop of the recorded code leaves a singleton its raw score; ours gives it 0.
    rloo = torch.where(alone, scores, found["rloo_vectorized"])
    close(rloo, rows.first(expected["rloo"]), **FP32)
    _check_reinforce(case, rows, found["grpo_nostd"], case["params"]["gamma_rpp"])


@pytest.mark.parametrize("case", cases("03"))
def test_group_outcomes_of_episodes(case: dict[str, Any]) -> None:
    given, expected = case["inputs"], case["outputs"]
    rows = Rows(given["response_mask"])
    rewards = _masked_sums(given["token_level_rewards"], rows)
    order, episode_of_action, groups, inverse = _by_episode(given)
    scores = credit_states.episode_scores(rewards[order], episode_of_action, len(groups))
    found = _outcomes(scores, groups)
    for ours, name in (
        ("grpo_std", "grpo_std"),
        ("grpo_nostd", "grpo_nostd"),
        ("rloo_vectorized", "rloo"),
    ):
        alone = (torch.bincount(groups)[groups] == 1)[episode_of_action][inverse]
        per_action = found[ours][episode_of_action][inverse]
        target = rows.first(expected[name])
        close(per_action[~alone], target[~alone], **FP32)
    centred = found["grpo_nostd"][episode_of_action][inverse]
    _check_reinforce(case, rows, centred, case["params"]["gamma"])
    for name, target in expected.items():
        if name.startswith("step_discounted_returns_g"):
            gamma = float(name.removeprefix("step_discounted_returns_g"))
            returns = credit_gae.discounted_returns(
                rewards[order], episode_of_action, torch.zeros_like(scores), gamma
            )
            close(returns[inverse], target, **FP32)


@pytest.mark.parametrize("case", cases("04"))
def test_step_gae_of_the_released_code(case: dict[str, Any]) -> None:
    given, expected = case["inputs"], case["outputs"]
    rows = Rows(given["response_mask"])
    order, episode_of_action, groups, inverse = _by_episode(given)
    step = expected["step"]
    rewards = _masked_sums(given["token_level_rewards"], rows)
    values = torch.tensor(given["values"], dtype=torch.float64)[:, 0]
    close(rewards, step["step_reward"])
    close(values, step["step_value"])
    config = resolve(
        {
            "preset": "capo_released",
            "gamma": case["params"]["gamma"],
            "lam": case["params"]["lam"],
        }
    )
    targets = assign_credit(
        Experience(
            rewards=rewards[order],
            episode_of_action=episode_of_action,
            action_of_token=_tokens_in(order, rows),
            terminated=torch.ones(len(groups), dtype=torch.bool),
            values=values[order],
        ),
        config,
    )
    assert targets.returns is not None
    close(targets.returns[inverse], step["step_return"])
    close(targets.advantages[inverse], step["step_advantage"])
    close(targets.advantages[inverse], rows.first(expected["advantages_whitened"]))
    tails = torch.zeros(len(groups), dtype=torch.float64)
    raw = credit_gae.gae(
        rewards[order],
        values[order],
        episode_of_action,
        tails,
        case["params"]["gamma"],
        case["params"]["lam"],
    )
    close(raw.advantages[inverse], step["step_advantage_raw"])
    following = credit_gae.following_values(values[order], episode_of_action, tails)
    close(following[inverse], step["step_next_value"])


@pytest.mark.parametrize("case", cases("05"))
@pytest.mark.parametrize("by_std", [False, True])
def test_gigpo(case: dict[str, Any], by_std: bool) -> None:
    given, expected, params = case["inputs"], case["outputs"], case["params"]
    rows = Rows(given["response_mask"])
    order, episode_of_action, groups, inverse = _by_episode(given)
    rewards = _masked_sums(given["token_level_rewards"], rows)[order]
    keys = [given["anchor_obs"][row] for row in order.tolist()]
    mode = "mean_std_norm" if by_std else "mean_norm"
    for name, by_action in ((f"upstream_{mode}", True), (f"capo_{mode}", False)):
        found = credit_states.gigpo(
            rewards,
            episode_of_action,
            groups,
            keys,
            params["gamma"],
            params["step_advantage_w"],
            by_std,
            by_action,
        ).advantages[inverse]
        close(found, rows.first(expected[name]), rtol=2e-4, atol=2e-4)
        episode_only = credit_states.gigpo(
            rewards, episode_of_action, groups, keys, params["gamma"], 0.0, by_std, by_action
        ).advantages[inverse]
        target = expected[f"upstream_episode_{mode}_cross_steps_{by_action}"]
        close(episode_only, rows.first(target), rtol=2e-4, atol=2e-4)
    returns = credit_gae.discounted_returns(
        rewards, episode_of_action, torch.zeros(len(groups), dtype=torch.float64), params["gamma"]
    )
    close(returns[inverse], expected["step_discounted_returns"])
    states = credit_states.state_ids(groups[episode_of_action], keys)[inverse]
    assert _partition(states.tolist()) == _partition(expected["step_groups"])


@pytest.mark.parametrize("case", cases("14"))
def test_g2po(case: dict[str, Any]) -> None:
    given, params = case["inputs"], case["params"]
    rows = Rows(given["response_mask"])
    order, episode_of_action, groups, inverse = _by_episode(given)
    keys = [given["anchor_obs"][row] for row in order.tolist()]
    scores = vector(given["episode_rewards"])[order]
    last = credit_gae.is_last(episode_of_action)
    invalid = 1.0 - vector(given["is_action_valid"])[order]
    arguments: Any = (torch.where(last, scores, 0.0), episode_of_action, groups, keys)
    found = credit_states.g2po(
        *arguments,
        params["gamma"],
        params["w"],
        params["mode"] == "mean_std_norm",
        params["success"],
        invalid * params["invalid_penalty"],
    )
    close(found.advantages[inverse], rows.first(case["outputs"]["advantages"]), **FP32)
    nodes = credit_states.state_ids(groups[episode_of_action], keys)
    values = credit_states.node_values(scores[last], episode_of_action, nodes, params["gamma"])
    close(values[inverse], case["outputs"]["node_value"], **FP32)


@pytest.mark.parametrize("case", cases("15"))
def test_hgpo(case: dict[str, Any]) -> None:
    given, params = case["inputs"], case["params"]
    rows = Rows(given["response_mask"])
    order, episode_of_action, groups, inverse = _by_episode(given)
    keys = [given["anchor_obs"][row] for row in order.tolist()]
    found = credit_states.hgpo(
        vector(given["step_returns"])[order],
        episode_of_action,
        groups,
        keys,
        params["history_length"],
        params["alpha"],
        params["mode"] == "mean_std_norm",
    )
    close(found.advantages[inverse], rows.first(case["outputs"]["advantages"]), **FP32)


@pytest.mark.parametrize("case", cases("20", having="rewards"))
def test_action_gae(case: dict[str, Any]) -> None:
    given, params = case["inputs"], case["params"]
    num_actions = len(given["rewards"])
    config = resolve({"preset": "capo", "gamma": params["gamma"], "lam": params["lam"]})
    targets = assign_credit(
        Experience(
            rewards=vector(given["rewards"]),
            episode_of_action=torch.zeros(num_actions, dtype=torch.int64),
            action_of_token=torch.arange(num_actions),
            terminated=torch.tensor([params["bootstrap"] == 0.0]),
            values=vector(given["values"]),
            bootstrap_values=vector([params["bootstrap"]]),
        ),
        config,
    )
    close(targets.advantages, case["outputs"]["advantages"])
    assert targets.returns is not None
    close(targets.returns, case["outputs"]["returns"])


@pytest.mark.parametrize("case", cases("21"))
def test_gagpo_as_reconstructed(case: dict[str, Any]) -> None:
    episodes, params = case["inputs"]["group"], case["params"]
    lengths = torch.tensor([len(episode["states"]) for episode in episodes])
    episode_of_action = torch.arange(len(episodes)).repeat_interleave(lengths)
    rewards = vector([reward for episode in episodes for reward in episode["rewards"]])
    keys = [state for episode in episodes for state in episode["states"]]
    group = torch.zeros(len(episodes), dtype=torch.int64)
    found = credit_states.gagpo(
        rewards, episode_of_action, group, keys, params["gamma"], params["lam"], params["eps"]
    )
    close(found.advantages, [one for row in case["outputs"]["adv"] for one in row])
    returns = credit_gae.discounted_returns(
        rewards,
        episode_of_action,
        torch.zeros(len(episodes), dtype=torch.float64),
        params["gamma"],
    )
    states = credit_states.state_ids(group[episode_of_action], keys)
    values = credit_groups.group_means(returns, states)
    close(values, [case["outputs"]["vbar"][key] for key in keys])


@pytest.mark.parametrize("case", cases("23"))
def test_brace_targets(case: dict[str, Any]) -> None:
    given, params = case["inputs"], case["params"]
    for steps, expected in case["outputs"].items():
        found = credit_gae.brace(
            *_one_episode(given, params),
            params["gamma"],
            params["rho_bar"],
            params["c_bar"],
            int(steps),
        )
        close(found.returns, expected["target"])
        close(found.advantages, expected["adv"])


@pytest.mark.parametrize("case", cases("24"))
def test_vtrace_over_actions(case: dict[str, Any]) -> None:
    given, params = case["inputs"], case["params"]
    for name, expected in case["outputs"].items():
        rho, c, lam = (
            float(part.removeprefix(prefix))
            for part, prefix in zip(name.split("_"), ("rho", "c", "lam"), strict=True)
        )
        found = credit_gae.vtrace(*_one_episode(given, params), params["gamma"], lam, rho, c)
        close(found.returns, expected["vs"])
        close(found.advantages, expected["adv"])


def _one_episode(given: Any, params: Any) -> Any:
    return (
        vector(given["rewards"]),
        vector(given["values"]),
        vector(given["log_w"]),
        torch.zeros(len(given["rewards"]), dtype=torch.int64),
        vector([params["bootstrap"]]),
    )


def _outcomes(scores: Tensor, groups: Tensor) -> dict[str, Tensor]:
    return {
        "grpo_std": credit_groups.standardised(scores, groups).advantages,
        "grpo_nostd": credit_groups.standardised(scores, groups, False).advantages,
        "rloo_vectorized": credit_groups.leave_one_out(scores, groups).advantages,
    }


def _check_reinforce(case: Any, rows: Rows, centred: Tensor, gamma: float) -> None:
    """The recorded plain form discounts within a row; the baseline form has no discount."""
    expected = case["outputs"]
    returns = credit_gae.discounted_returns(
        rows.flat(case["inputs"]["token_level_rewards"]),
        rows.action_of_token,
        torch.zeros(rows.num_actions, dtype=torch.float64),
        gamma,
    )
    close(returns, rows.flat(expected["rpp_ret"]), **FP32)
    close(credit_groups.whitened(returns), rows.flat(expected["rpp_adv"]), **FP32)
    whitened = credit_groups.whitened(centred[rows.action_of_token])
    close(whitened, rows.flat(expected["rpp_baseline"]), **FP32)


def _masked_sums(matrix: list[list[float]], rows: Rows) -> Tensor:
    return (torch.tensor(matrix, dtype=torch.float64) * rows.mask).sum(dim=1)


def _by_episode(given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(order [K] of rows by episode and step, episode_of_action [K] in that order, group of each
    episode, inverse of the order)."""
    names = given.get("trajectory_uids") or given["traj_uid"]
    steps = given.get("step_indices") or list(range(len(names)))
    episodes = numbered(names)
    order = torch.from_numpy(np.lexsort((np.asarray(steps), episodes.numpy())))
    group_names = given.get("uid") or names
    group_of_episode = {
        int(episode): group for episode, group in zip(episodes, group_names, strict=True)
    }
    groups = numbered([group_of_episode[one] for one in range(len(group_of_episode))])
    return order, episodes[order], groups, order.argsort()


def _tokens_in(order: Tensor, rows: Rows) -> Tensor:
    lengths = rows.lengths[order].to(torch.int64)
    return torch.arange(rows.num_actions).repeat_interleave(lengths)


def _partition(labels: list[Any]) -> list[int]:
    return numbered([str(label) for label in labels]).tolist()
