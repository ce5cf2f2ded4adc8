"""Anchored targets and state comparisons against their slow definitions, over their options."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from capo.configs.algorithms import resolve
from capo.learner.credit import assign_credit
from capo.learner.credit_gae import brace
from capo.learner.credit_states import hgpo
from tests import oracles
from tests.learner.credit_cases import Batch
from tests.recorded import close, vector

EXACT = {"rtol": 1e-9, "atol": 1e-10}

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=6)
seeds = st.integers(0, 2**31)
gammas = st.sampled_from([1.0, 0.95, 0.5])


@given(
    shape=shapes,
    seed=seeds,
    gamma=gammas,
    caps=st.sampled_from([(1.0, 1.0), (1.2, 1.1), (0.7, 1.3), (1e9, 1e9)]),
    num_steps=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=60, deadline=None)
def test_brace_over_many_episodes(
    shape: list[int], seed: int, gamma: float, caps: tuple[float, float], num_steps: int
) -> None:
    batch = Batch(shape, seed)
    algorithm = resolve(
        {
            "preset": "brace",
            "gamma": gamma,
            "trace_steps": num_steps,
            "trace_rho_cap": caps[0],
            "trace_c_cap": caps[1],
        }
    )
    targets = assign_credit(batch.experience(algorithm), algorithm)
    returns: list[float] = []
    advantages: list[float] = []
    for rewards, values, weights, tail in zip(
        batch.by_episode(batch.rewards),
        batch.by_episode(batch.boundary_values),
        batch.by_episode(batch.log_weights.exp()),
        batch.tails(),
        strict=True,
    ):
        mine = oracles.brace_targets(rewards, values, weights, tail, gamma, *caps, num_steps)
        returns += mine
        advantages += [
            reward + gamma * after - value
            for reward, after, value in zip(rewards, [*mine[1:], tail], values, strict=True)
        ]
    assert targets.returns is not None
    close(targets.returns, returns, **EXACT)
    close(targets.advantages, advantages, **EXACT)


@given(shape=shapes, seed=seeds, gamma=gammas)
@settings(max_examples=30, deadline=None)
def test_brace_reaches_from_the_return_to_vtrace(shape: list[int], seed: int, gamma: float) -> None:
    """No corrected step is Monte Carlo; as many as the longest episode has are V-trace."""
    batch = Batch(shape, seed)
    episode_of_action = batch.experience(resolve("brace")).episode_of_action
    for num_steps in (0, max(shape), 10**6):
        found = brace(
            batch.rewards,
            batch.boundary_values,
            batch.log_weights,
            episode_of_action,
            vector(batch.tails()),
            gamma,
            1.2,
            1.1,
            num_steps,
        )
        expected: list[float] = []
        for rewards, values, weights, tail in zip(
            batch.by_episode(batch.rewards),
            batch.by_episode(batch.boundary_values),
            batch.by_episode(batch.log_weights.exp()),
            batch.tails(),
            strict=True,
        ):
            expected += (
                oracles.vtrace_targets(rewards, values, weights, tail, gamma, 1.0, 1.2, 1.1)
                if num_steps
                else oracles.returns_to_go(rewards, tail, gamma)
            )
        close(found.returns, expected, **EXACT)


@given(
    shape=shapes,
    seed=seeds,
    gamma=gammas,
    size=st.integers(1, 4),
    step_weight=st.sampled_from([1.0, 0.3]),
    by_std=st.booleans(),
    sparse=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_g2po(
    shape: list[int],
    seed: int,
    gamma: float,
    size: int,
    step_weight: float,
    by_std: bool,
    sparse: bool,
) -> None:
    batch = _visited(shape, seed, size, sparse)
    algorithm = resolve(
        {"preset": "g2po", "gamma": gamma, "step_weight": step_weight, "group_std": by_std}
    )
    targets = assign_credit(batch.experience(algorithm), algorithm)
    expected = _by_group(batch, size, oracles.g2po, gamma, step_weight, by_std, 1.0)
    close(targets.advantages, expected, **EXACT)


@given(
    shape=shapes,
    seed=seeds,
    gamma=gammas,
    size=st.integers(1, 4),
    history_length=st.integers(0, 4),
    power=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    by_std=st.booleans(),
    sparse=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_hgpo(
    shape: list[int],
    seed: int,
    gamma: float,
    size: int,
    history_length: int,
    power: float,
    by_std: bool,
    sparse: bool,
) -> None:
    batch = _visited(shape, seed, size, sparse)
    algorithm = resolve(
        {
            "preset": "hgpo",
            "gamma": gamma,
            "group_std": by_std,
            "history_length": history_length,
            "history_power": power,
        }
    )
    targets = assign_credit(batch.experience(algorithm), algorithm)
    expected = _by_group(batch, size, oracles.hgpo, gamma, history_length, power, by_std)
    close(targets.advantages, expected, **EXACT)


@pytest.mark.parametrize("unit", [1.0, 0.1, 1e3])
def test_an_average_return_says_nothing_at_its_level_whatever_rounding_says(unit: float) -> None:
    """The mean of .1, .2 and .3 is not .2 in floating point, but that of 1, 2 and 3 is 2."""
    found = hgpo(
        vector([0.0, 1.0, 0.0, 2.0, 0.0, 3.0]) * unit,
        torch.arange(3).repeat_interleave(2),
        torch.zeros(3, dtype=torch.int64),
        ["a", "s", "a", "s", "b", "s"],
        history_length=1,
        power=1.0,
        divide_by_std=False,
    )
    # Level 0 says nothing of the second return; level 1 compares it with the first alone.
    close(found.advantages[3], 0.5 * unit, **EXACT)


def _visited(shape: list[int], seed: int, size: int, sparse: bool) -> Batch:
    """Few states, some of them without a key. `sparse`: rewards are 0, 1/2 or 1, so that scores tie
    and some are a success's exactly."""
    batch = Batch(shape, seed, group_size=size)
    generator = torch.Generator().manual_seed(seed)
    states = torch.randint(0, 4, (sum(shape),), generator=generator).tolist()
    batch.state_keys = [("", "a", "b", "b")[one] for one in states]
    if sparse:
        batch.rewards = torch.randint(0, 3, (sum(shape),), generator=generator).double() / 2
    return batch


def _by_group(batch: Batch, size: int, oracle: Callable[..., Any], *options: Any) -> list[float]:
    """The oracle's advantages of all groups, flat."""
    keys = iter(batch.state_keys)
    states = [[next(keys) for _ in range(count)] for count in batch.counts]
    rewards = batch.by_episode(batch.rewards)
    return [
        value
        for start in range(0, len(rewards), size)
        for row in oracle(rewards[start : start + size], states[start : start + size], *options)
        for value in row
    ]
