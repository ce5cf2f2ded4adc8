"""Credit over ragged batches: slow definitions, ends of episodes, groups of all kinds."""

from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from capo.configs.algorithm_checks import CREDIT_READS
from capo.configs.algorithms import AlgorithmConfig, critic_reads, needs_critic, resolve
from capo.configs.presets import PRESETS
from capo.configs.words import choices
from capo.learner.credit import Experience, Targets, assign_credit, rewards_on_tokens
from capo.learner.credit_gae import vtrace
from capo.learner.credit_groups import leave_one_out, standardised, whitened
from tests import oracles
from tests.learner.credit_cases import Batch
from tests.recorded import close, vector

EXACT = {"rtol": 1e-9, "atol": 1e-10}
CRITICS = sorted(name for name in PRESETS if needs_critic(resolve(name)))
GROUPED = sorted(name for name in PRESETS if not needs_critic(resolve(name)))


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=6)
seeds = st.integers(0, 2**31)


@given(shape=shapes, seed=seeds, gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.7]))
@settings(max_examples=40, deadline=None)
def test_action_gae_over_many_episodes(
    shape: list[int], seed: int, gamma: float, lam: float
) -> None:
    batch = Batch(shape, seed)
    algorithm = resolve({"gamma": gamma, "lam": lam})
    targets = assign_credit(batch.experience(algorithm), algorithm)
    expected = [
        value
        for rewards, values, tail in zip(
            batch.by_episode(batch.rewards),
            batch.by_episode(batch.boundary_values),
            batch.tails(),
            strict=True,
        )
        for value in oracles.gae(rewards, values, tail, gamma, lam)
    ]
    close(targets.advantages, expected, **EXACT)
    assert targets.returns is not None
    close(targets.returns, vector(expected) + batch.boundary_values, **EXACT)


@given(shape=shapes, seed=seeds)
@settings(max_examples=30, deadline=None)
def test_lambda_one_targets_are_returns_that_no_value_touches(shape: list[int], seed: int) -> None:
    batch = Batch(shape, seed)
    algorithm = resolve("capo")
    targets = assign_credit(batch.experience(algorithm), algorithm)
    moved = batch.experience(algorithm, values=batch.boundary_values * -3 + 7)
    other = assign_credit(moved, algorithm)
    assert targets.returns is not None
    assert other.returns is not None
    close(targets.returns, other.returns, **EXACT)
    expected = [
        value
        for rewards, tail in zip(batch.by_episode(batch.rewards), batch.tails(), strict=True)
        for value in oracles.returns_to_go(rewards, tail, algorithm.gamma)
    ]
    close(targets.returns, expected, **EXACT)


@pytest.mark.parametrize("preset", CRITICS)
def test_a_truncated_end_is_not_a_terminated_one(preset: str) -> None:
    batch = Batch([3], seed=1)
    algorithm = resolve({"preset": preset, "whiten": "none", "bootstrap_truncated": True})
    found = {}
    for terminated in (True, False):
        experience = batch.experience(algorithm, terminated=torch.tensor([terminated]))
        targets = assign_credit(experience, algorithm)
        assert targets.returns is not None
        found[terminated] = targets.returns
    assert not torch.allclose(found[True], found[False])
    paper = resolve({"preset": preset, "whiten": "none", "bootstrap_truncated": False})
    experience = batch.experience(paper, terminated=torch.tensor([False]))
    as_in_the_paper = assign_credit(experience, paper).returns
    assert as_in_the_paper is not None
    close(as_in_the_paper, found[True])


@pytest.mark.parametrize("preset", CRITICS)
def test_a_bootstrap_after_termination_is_never_read(preset: str) -> None:
    batch = Batch([3, 2], seed=1)
    algorithm = resolve(preset)
    ended = torch.tensor([True, True])
    wild = vector([1e9, float("nan")])
    with_wild = assign_credit(
        batch.experience(algorithm, terminated=ended, bootstrap_values=wild), algorithm
    )
    without = assign_credit(
        batch.experience(algorithm, terminated=ended, bootstrap_values=None), algorithm
    )
    close(with_wild.token_advantages, without.token_advantages)


def test_a_truncated_episode_without_a_bootstrap_value_is_refused() -> None:
    batch = Batch([3], seed=1)
    algorithm = resolve("capo")
    experience = batch.experience(
        algorithm, terminated=torch.tensor([False]), bootstrap_values=None
    )
    with pytest.raises(ValueError, match="needs a bootstrap value"):
        assign_credit(experience, algorithm)


def test_a_fragment_cut_at_a_boundary_gets_the_credit_of_the_whole_at_lambda_zero() -> None:
    batch = Batch([4], seed=2)
    algorithm = resolve({"lam": 0.0})
    whole = assign_credit(batch.experience(algorithm, terminated=torch.tensor([True])), algorithm)
    fragment = Experience(
        rewards=batch.rewards[:2],
        episode_of_action=torch.zeros(2, dtype=torch.int64),
        action_of_token=torch.arange(2),
        terminated=torch.tensor([False]),
        values=batch.boundary_values[:2],
        bootstrap_values=batch.boundary_values[2:3],
    )
    close(assign_credit(fragment, algorithm).advantages, whole.advantages[:2])


def test_rewards_land_on_the_last_token_of_their_action() -> None:
    index = torch.tensor([0, 0, 0, 1, 2, 2])
    placed = rewards_on_tokens(vector([5.0, 7.0, 9.0]), index)
    assert placed.tolist() == [0.0, 0.0, 5.0, 7.0, 0.0, 9.0]


@given(shape=shapes, seed=seeds)
@settings(max_examples=30, deadline=None)
def test_token_gae_carries_across_actions(shape: list[int], seed: int) -> None:
    batch = Batch(shape, seed)
    algorithm = resolve({"preset": "ppo", "gamma": 0.95, "lam": 0.9, "whiten": "none"})
    experience = batch.experience(algorithm)
    targets = assign_credit(experience, algorithm)
    rewards = rewards_on_tokens(batch.rewards, experience.action_of_token)
    episode = experience.episode_of_action[experience.action_of_token]
    expected: list[float] = []
    for number, tail in enumerate(batch.tails()):
        mine = episode == number
        expected += oracles.gae(
            rewards[mine].tolist(), batch.token_values[mine].tolist(), tail, 0.95, 0.9
        )
    close(targets.token_advantages, expected, **EXACT)
    assert targets.returns is not None
    close(targets.returns, vector(expected) + batch.token_values, **EXACT)
    per_action = vector(expected).split(batch.lengths)
    close(targets.advantages, torch.stack([part.mean() for part in per_action]), **EXACT)


@given(
    shape=shapes,
    seed=seeds,
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.8]),
    caps=st.sampled_from([(1.0, 1.0), (1.2, 1.1), (1e9, 1e9)]),
)
@settings(max_examples=40, deadline=None)
def test_vtrace_over_many_episodes(
    shape: list[int], seed: int, gamma: float, lam: float, caps: tuple[float, float]
) -> None:
    batch = Batch(shape, seed)
    experience = batch.experience(resolve("vtrace"))
    tails = vector(batch.tails())
    found = vtrace(
        batch.rewards,
        batch.boundary_values,
        batch.log_weights,
        experience.episode_of_action,
        tails,
        gamma,
        lam,
        *caps,
    )
    expected = [
        value
        for rewards, values, weights, tail in zip(
            batch.by_episode(batch.rewards),
            batch.by_episode(batch.boundary_values),
            batch.by_episode(batch.log_weights.exp()),
            batch.tails(),
            strict=True,
        )
        for value in oracles.vtrace_targets(rewards, values, weights, tail, gamma, lam, *caps)
    ]
    close(found.returns, expected, **EXACT)


def test_on_policy_vtrace_and_brace_are_gae_at_lambda_one() -> None:
    batch = Batch([3, 5], seed=3)
    targets = {}
    for preset in ("capo", "vtrace", "brace"):
        algorithm = resolve({"preset": preset, "trace_rho_cap": 1.0, "trace_c_cap": 1.0})
        experience = batch.experience(algorithm, log_weights=torch.zeros(8, dtype=torch.float64))
        targets[preset] = assign_credit(experience, algorithm)
    for preset in ("vtrace", "brace"):
        close(targets[preset].advantages, targets["capo"].advantages, **EXACT)


@given(shape=shapes, seed=seeds, size=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_grpo_and_rloo_by_group(shape: list[int], seed: int, size: int) -> None:
    batch = Batch(shape, seed, group_size=size)
    scores = [sum(row) for row in batch.by_episode(batch.rewards)]
    expected_z: list[float] = []
    expected_loo: list[float] = []
    for start in range(0, len(scores), size):
        group = scores[start : start + size]
        expected_z += oracles.standardised(group)
        for member, score in enumerate(group):
            others = group[:member] + group[member + 1 :]
            expected_loo.append(score - sum(others) / len(others) if others else 0.0)
    for preset, expected in (("grpo", expected_z), ("rloo", expected_loo)):
        algorithm = resolve(preset)
        targets = assign_credit(batch.experience(algorithm), algorithm)
        per_action = [
            value for value, count in zip(expected, shape, strict=True) for _ in range(count)
        ]
        close(targets.advantages, per_action, **EXACT)
        assert targets.returns is None


@given(shape=st.lists(st.integers(1, 4), min_size=2, max_size=4), seed=seeds)
@settings(max_examples=30, deadline=None)
def test_reinforce_pp_discounts_over_the_whole_episode(shape: list[int], seed: int) -> None:
    batch = Batch(shape, seed, group_size=len(shape))
    algorithm = resolve({"preset": "reinforce_pp", "gamma": 0.9, "whiten": "none"})
    targets = assign_credit(batch.experience(algorithm), algorithm)
    lengths = iter(batch.lengths)
    counts = [[next(lengths) for _ in range(count)] for count in shape]
    expected = oracles.reinforce_pp(batch.by_episode(batch.rewards), counts, 0.9)
    flat = [value for episode in expected for action in episode for value in action]
    close(targets.token_advantages, flat, **EXACT)
    white = resolve({"preset": "reinforce_pp", "gamma": 0.9})
    found = assign_credit(batch.experience(white), white).token_advantages
    close(found, whitened(vector(flat)), **EXACT)


def test_a_later_reward_reaches_the_first_action_of_reinforce_pp() -> None:
    batch = Batch([3, 3], seed=0)
    rewards = torch.zeros(6, dtype=torch.float64)
    rewards[2] = 1.0
    algorithm = resolve({"preset": "reinforce_pp", "gamma": 0.9, "whiten": "none"})
    targets = assign_credit(batch.experience(algorithm, rewards=rewards), algorithm)
    first, other = targets.token_advantages[0], targets.token_advantages[-1]
    assert float(first) > float(other)


@given(shape=st.lists(st.integers(1, 5), min_size=2, max_size=4), seed=seeds)
@settings(max_examples=30, deadline=None)
def test_gagpo(shape: list[int], seed: int) -> None:
    batch = Batch(shape, seed, group_size=len(shape))
    algorithm = resolve("gagpo")
    targets = assign_credit(batch.experience(algorithm), algorithm)
    keys = iter(batch.state_keys)
    states = [[next(keys) for _ in range(count)] for count in shape]
    expected = oracles.gagpo(batch.by_episode(batch.rewards), states, 0.95, 0.8)
    close(targets.advantages, [value for row in expected for value in row], **EXACT)


def test_states_of_different_groups_and_empty_keys_are_never_compared() -> None:
    algorithm = resolve({"preset": "gigpo", "step_weight": 1.0})
    batch = Batch([2, 2, 2, 2], seed=4, group_size=2)
    episode_only = resolve({"preset": "gigpo", "step_weight": 0.0})
    base = assign_credit(batch.experience(episode_only), episode_only).advantages
    across = ["a", "b", "c", "d", "a", "b", "c", "d"]  # equal keys only in different groups
    for keys in ([""] * 8, across):
        found = assign_credit(batch.experience(algorithm, state_keys=keys), algorithm)
        close(found.advantages, base)
    within = ["a", "b", "a", "b", "c", "d", "c", "d"]
    found = assign_credit(batch.experience(algorithm, state_keys=within), algorithm)
    assert not torch.allclose(found.advantages, base)


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("outcome", [0.0, 1.0])
def test_all_failed_and_all_solved_batches_are_finite(preset: str, outcome: float) -> None:
    batch = Batch([2, 2, 2, 2], seed=0, ends=1.0)
    rewards = torch.tensor([0.0, outcome] * 4, dtype=torch.float64)
    algorithm = resolve(preset)
    experience = batch.experience(
        algorithm,
        rewards=rewards,
        state_keys=["a", "b"] * 4,
        values=None if critic_reads(algorithm) == "none" else _like(batch, algorithm, 0.0),
    )
    targets = assign_credit(experience, algorithm)
    _assert_finite(targets)
    if preset in GROUPED:
        # No contrast, no gradient, and it is said so; only REINFORCE++ whitens what is left.
        assert not targets.contrast.any() or preset == "g2po"
        if algorithm.credit not in ("reinforce_pp", "g2po"):
            assert float(targets.advantages.abs().max()) < 1e-9


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_smallest_batch_is_finite(preset: str) -> None:
    """One episode of one action of one token: a singleton group, a variance of nothing."""
    algorithm = resolve(preset)
    experience = Experience(
        rewards=vector([1.0]),
        episode_of_action=torch.zeros(1, dtype=torch.int64),
        action_of_token=torch.zeros(1, dtype=torch.int64),
        terminated=torch.tensor([True]),
        group_of_episode=torch.tensor([0]),
        state_keys=["s"],
        values=None if critic_reads(algorithm) == "none" else vector([0.25]),
        log_weights=vector([0.0]),
    )
    targets = assign_credit(experience, algorithm)
    _assert_finite(targets)
    assert targets.token_advantages.shape == (1,)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_an_empty_batch_is_empty(preset: str) -> None:
    algorithm = resolve(preset)
    nothing = torch.zeros(0, dtype=torch.float64)
    index = torch.zeros(0, dtype=torch.int64)
    experience = Experience(
        rewards=nothing,
        episode_of_action=index,
        action_of_token=index,
        terminated=torch.zeros(0, dtype=torch.bool),
        group_of_episode=index,
        values=None if critic_reads(algorithm) == "none" else nothing,
        bootstrap_values=nothing,
        log_weights=nothing,
    )
    targets = assign_credit(experience, algorithm)
    assert targets.advantages.shape == (0,)


@given(seed=seeds, preset=st.sampled_from(sorted(PRESETS)))
@settings(max_examples=60, deadline=None)
def test_the_order_of_episodes_changes_nothing(seed: int, preset: str) -> None:
    batch = Batch([2, 4, 1, 3], seed)
    algorithm = resolve(preset)
    experience = batch.experience(algorithm)
    forward = assign_credit(experience, algorithm)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    actions = torch.cat([torch.nonzero(experience.episode_of_action == e)[:, 0] for e in order])
    tokens = torch.cat([torch.nonzero(experience.action_of_token == a)[:, 0] for a in actions])
    reads = critic_reads(algorithm)
    counts = torch.tensor(batch.counts)[order]
    lengths = torch.tensor(batch.lengths)[actions]
    shuffled = Experience(
        rewards=batch.rewards[actions],
        episode_of_action=torch.arange(4).repeat_interleave(counts),
        action_of_token=torch.arange(10).repeat_interleave(lengths),
        terminated=batch.terminated[order],
        group_of_episode=batch.groups[order],
        state_keys=[batch.state_keys[a] for a in actions],
        values={
            "boundary": batch.boundary_values[actions],
            "token": batch.token_values[tokens],
            "none": None,
        }[reads],
        bootstrap_values=batch.bootstrap[order],
        log_weights=batch.log_weights[actions],
    )
    found = assign_credit(shuffled, algorithm)
    close(found.advantages, forward.advantages[actions], **EXACT)
    close(found.token_advantages, forward.token_advantages[tokens], **EXACT)
    assert torch.equal(found.contrast, forward.contrast[actions])


def test_flat_groups_leave_the_batch_only_where_the_algorithm_says_so() -> None:
    batch = Batch([1, 1, 1, 1], seed=0)
    rewards = vector([1.0, 1.0, 0.0, 1.0])
    for preset, counted in (
        ("grpo", [True, True, True, True]),
        ("dapo", [False, False, True, True]),
    ):
        algorithm = resolve(preset)
        targets = assign_credit(batch.experience(algorithm, rewards=rewards), algorithm)
        assert targets.contrast.tolist() == [False, False, True, True]
        assert targets.counted.tolist() == counted


def test_equal_scores_that_rounding_tells_apart_have_no_contrast() -> None:
    scores = vector([0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2])
    found = standardised(scores, torch.zeros(4, dtype=torch.int64))
    assert found.advantages.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert not found.contrast.any()


def test_singletons() -> None:
    group = torch.tensor([0])
    close(standardised(vector([0.7]), group).advantages, [0.7 / (1 + 1e-6)])
    assert standardised(vector([0.7]), group, raw_singletons=False).advantages.tolist() == [0.0]
    assert leave_one_out(vector([0.7]), group).advantages.tolist() == [0.0]


def test_group_ids_need_not_be_dense_or_adjacent() -> None:
    scores = vector([1.0, 5.0, 3.0, 7.0])
    scattered = standardised(scores, torch.tensor([900, -4, 900, -4])).advantages
    dense = standardised(scores[torch.tensor([0, 2, 1, 3])], torch.tensor([0, 0, 1, 1])).advantages
    close(scattered, dense[torch.tensor([0, 2, 1, 3])])


def test_whitening_has_mean_zero_and_variance_one_over_what_counts() -> None:
    batch = Batch([3, 4, 2], seed=6)
    algorithm = resolve("capo_released")
    targets = assign_credit(batch.experience(algorithm), algorithm)
    close(targets.advantages.mean(), 0.0)
    close(targets.advantages.std(), 1.0, rtol=1e-6, atol=1e-6)
    algorithm = resolve("ppo")
    targets = assign_credit(batch.experience(algorithm), algorithm)
    close(targets.token_advantages.mean(), 0.0)
    close(targets.token_advantages.std(), 1.0, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("whiten", ["action", "token"])
@pytest.mark.parametrize("credit", ["group", "rloo", "reinforce_pp"])
def test_whitening_is_blind_to_what_left_the_batch(credit: str, whiten: str) -> None:
    batch = Batch([1, 1, 1, 1, 1, 1], seed=0)
    changes = {"credit": credit, "whiten": whiten, "group_std": False}
    algorithm = resolve({"preset": "dapo", **changes})
    rewards = vector([5.0, 5.0, 0.0, 1.0, 0.0, 4.0])
    experience = batch.experience(algorithm, rewards=rewards)
    targets = assign_credit(experience, algorithm)
    assert targets.counted.tolist() == [False, False, True, True, True, True]
    if whiten == "action":
        counted = targets.advantages[2:]
    else:
        counted = targets.token_advantages[experience.action_of_token >= 2]
    close(counted.mean(), 0.0)
    close(counted.std(), 1.0, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("credit", sorted(CREDIT_READS))
def test_a_credit_reads_what_it_is_said_to_read(credit: str) -> None:
    assert set(CREDIT_READS) == set(choices(AlgorithmConfig, "credit"))
    batch = Batch([4, 5, 3, 4], seed=7, group_size=4)
    rewards = torch.where(torch.arange(16) == 3, 1.0 - batch.rewards[:3].sum(), batch.rewards)
    algorithm = resolve({"credit": credit, "gamma": 0.9, "lam": 0.8, "success_reward": 1.0})
    other: dict[str, Any] = {
        "gamma": 0.7, "lam": 0.5, "bootstrap_truncated": False, "trace_steps": 1,
        "trace_rho_cap": 0.8, "trace_c_cap": 0.7, "group_std": False, "group_weighting": "action",
        "step_weight": 0.3, "success_reward": 9.0, "history_length": 0, "history_power": 3.0,
    }  # fmt: skip
    assert set(other) == {key for keys in CREDIT_READS.values() for key in keys}

    def advantages(one: AlgorithmConfig) -> torch.Tensor:
        return assign_credit(batch.experience(one, rewards=rewards), one).token_advantages

    before = advantages(algorithm)
    for key, value in other.items():
        after = advantages(msgspec.structs.replace(algorithm, **{key: value}))
        assert torch.equal(after, before) is (key not in CREDIT_READS[credit]), key


def test_what_is_missing_or_misshapen_is_named() -> None:
    batch = Batch([2, 1], seed=0)
    capo, grpo, ppo, gigpo = (resolve(name) for name in ("capo", "grpo", "ppo", "gigpo"))
    with pytest.raises(ValueError, match="needs the critic's values"):
        assign_credit(batch.experience(capo, values=None), capo)
    with pytest.raises(ValueError, match="for 3 actions"):
        assign_credit(batch.experience(capo, values=batch.boundary_values[:2]), capo)
    with pytest.raises(ValueError, match="no group ids"):
        assign_credit(batch.experience(grpo, group_of_episode=None), grpo)
    with pytest.raises(ValueError, match="tokens"):
        assign_credit(batch.experience(ppo, values=batch.boundary_values[:1]), ppo)
    with pytest.raises(ValueError, match="0 state keys for 3 actions"):
        assign_credit(batch.experience(gigpo, state_keys=()), gigpo)
    with pytest.raises(ValueError, match="names episode 1, but there are only 1"):
        assign_credit(batch.experience(capo, terminated=torch.tensor([True])), capo)


def _like(batch: Batch, algorithm: Any, value: float) -> Tensor:
    like = batch.token_values if critic_reads(algorithm) == "token" else batch.boundary_values
    return torch.full_like(like, value)


def _assert_finite(targets: Targets) -> None:
    assert bool(targets.advantages.isfinite().all())
    assert bool(targets.token_advantages.isfinite().all())
    if targets.returns is not None:
        assert bool(targets.returns.isfinite().all())
