import msgspec
import numpy as np
import pytest
import torch

from capo.configs.algorithms import AlgorithmConfig
from capo.learner.batch import build_batch
from capo.learner.microbatch import collate
from capo.learner.minibatches import plan_minibatches
from capo.learner.ranks import join
from capo.learner.results import compare
from capo.learner.update import policy_learning_rate, run_update
from capo.protocol.records import EpisodeStatus
from tests.factories import batch_of_episodes, cut_apart, episode, run_config, step, tiny_policy
from tests.learner.exact import exact_models

EPISODES = batch_of_episodes(8, seed=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("policy"))


def updated(folder, config, episodes=EPISODES, *, version=0):
    models = exact_models(folder, config, join(), reference=folder)
    return run_update(episodes, version, models, config, join()), models


def test_before_the_first_step_every_ratio_is_exactly_one_and_nothing_is_clipped(folder):
    for token_budget in (30, 512):
        config = run_config(minibatches=3, token_budget=token_budget)
        result, _ = updated(folder, config)
        first, second = result.minibatches[0], result.minibatches[1]
        assert first.mu == 0.0
        assert np.array_equal(first.ratio, np.ones(len(first.actions)))
        assert first.out_of_range.sum() == first.active.sum() == 0
        assert second.mu != 0.0
        assert np.abs(second.log_ratio).max() > 1e-3


def test_every_action_is_in_one_minibatch_of_every_epoch(folder):
    result, _ = updated(folder, run_config(minibatches=3, epochs=2))
    assert [one.epoch for one in result.minibatches] == [0, 0, 0, 1, 1, 1]
    for epoch in (0, 1):
        parts = [one for one in result.minibatches if one.epoch == epoch]
        actions = np.concatenate([one.actions for one in parts])
        assert np.array_equal(np.sort(actions), np.arange(len(result.actions.length)))
        episodes = np.concatenate([one.episodes for one in parts])
        assert sorted(episodes) == list(range(len(EPISODES)))
    first, second = (result.minibatches[start].episodes for start in (0, 3))
    assert not np.array_equal(first, second)  # shuffled anew


def test_shuffling_follows_the_seed_and_the_version(folder):
    compositions = [
        updated(folder, run_config(seed=seed), version=version)[0].minibatches[0].episodes.tolist()
        for seed, version in ((0, 0), (0, 0), (1, 0), (0, 3))
    ]
    assert compositions[0] == compositions[1]
    assert len({tuple(one) for one in compositions}) == 3


def test_the_order_of_episodes_changes_no_bit(folder):
    config = run_config(minibatches=2)
    result, _ = updated(folder, config)
    permuted, _ = updated(folder, config, EPISODES[::-1])
    assert compare(result, permuted) == []


def test_the_token_budget_changes_nothing_but_rounding(folder):
    results = []
    for token_budget in (512, 30):
        config = run_config(minibatches=2, token_budget=token_budget, policy_lr=1e-3)
        results.append(updated(folder, config)[0])
    whole, cut = results
    assert whole.metrics["batch/microbatches"] == 2
    assert cut.metrics["batch/microbatches"] >= 6
    np.testing.assert_allclose(cut.actions.value, whole.actions.value, rtol=1e-10)
    np.testing.assert_allclose(cut.actions.advantage, whole.actions.advantage, rtol=1e-9)
    for one, other in zip(cut.minibatches, whole.minibatches, strict=True):
        np.testing.assert_allclose(one.log_ratio, other.log_ratio, rtol=1e-6, atol=1e-9)
        assert one.policy_loss == pytest.approx(other.policy_loss, rel=1e-6)
        assert one.critic_loss == pytest.approx(other.critic_loss, rel=1e-6)
        assert one.policy_grad_norm == pytest.approx(other.policy_grad_norm, rel=1e-6)


def ended(status):
    played = [step(reward=0.0), step(keep=5, reward=1.0)]
    final = {"final_keep": 10, "final_observation": [6, 7]} if status == "truncated" else {}
    return episode(played, status=EpisodeStatus(status), episode_id="one.0", **final)


def test_a_truncated_end_is_bootstrapped_and_a_terminated_one_is_not(folder):
    config = run_config(minibatches=1, algorithm=AlgorithmConfig(gamma=0.9, lam=1.0))
    others = batch_of_episodes(1)
    terminated, _ = updated(folder, config, [ended("terminated"), *others])
    truncated, _ = updated(folder, config, [ended("truncated"), *others])
    rows = np.flatnonzero(terminated.actions.episode == terminated.episode_ids.index("one.0"))
    assert truncated.episode_ids == terminated.episode_ids
    np.testing.assert_allclose(terminated.actions.returns[rows], [0.9, 1.0], rtol=1e-12)
    bootstrap = (truncated.actions.returns[rows] - [0.9, 1.0]) / [0.9**2, 0.9]
    assert bootstrap[0] == pytest.approx(bootstrap[1], rel=1e-9)
    assert abs(bootstrap[0]) > 1e-3


def test_the_bootstrap_is_the_critic_s_value_of_the_final_prompt(folder):
    """A longer episode that goes on from there reads the same value as its next boundary."""
    config = run_config(minibatches=1, algorithm=AlgorithmConfig(gamma=1.0))
    truncated, _ = updated(folder, config, [ended("truncated")])
    longer = episode(
        [step(), step(keep=5, reward=1.0), step(keep=10, observation=[6, 7], action=[8])]
    )
    went_on, _ = updated(folder, config, [longer])
    bootstrap = truncated.actions.returns[-1] - 1.0
    assert bootstrap == pytest.approx(went_on.actions.value[2], rel=1e-10)


def test_merged_and_separately_sent_steps_update_the_same(folder):
    config = run_config(minibatches=1)
    merged = batch_of_episodes(5, seed=4, rebuilt=0.0)
    one, _ = updated(folder, config, merged)
    other, _ = updated(folder, config, [cut_apart(played) for played in merged])
    assert other.metrics["batch/segments"] > one.metrics["batch/segments"]
    assert other.metrics["batch/tokens"] > one.metrics["batch/tokens"]
    assert other.metrics["batch/trained_tokens"] == one.metrics["batch/trained_tokens"]
    np.testing.assert_allclose(other.actions.value, one.actions.value, rtol=1e-9)
    np.testing.assert_allclose(other.actions.advantage, one.actions.advantage, rtol=1e-9)
    pairs = zip(one.minibatches, other.minibatches, strict=True)
    for a, b in pairs:
        assert a.policy_loss == pytest.approx(b.policy_loss, rel=1e-9)
        assert a.policy_grad_norm == pytest.approx(b.policy_grad_norm, rel=1e-9)
        assert a.critic_grad_norm == pytest.approx(b.critic_grad_norm, rel=1e-9)


def test_the_sampled_tokens_are_trained_with_the_stop_token_and_no_forced_one(folder):
    stop = 22
    played = episode(
        [step(observation=[1, 2], action=[3, stop]), step(keep=4, observation=[5], action=[6])]
    )
    (minibatch,) = plan_minibatches(
        build_batch([played]), join(), minibatches=1, epochs=1, token_budget=9, seed=0, version=0
    )
    assert minibatch.microbatches[0].labels.tolist() == [3, stop, 6]
    result, _ = updated(folder, run_config(minibatches=1), [played])
    assert result.metrics["batch/trained_tokens"] == 3
    assert result.metrics["batch/tokens"] == 6
    assert result.actions.length.tolist() == [2, 1]


@pytest.mark.parametrize("reward", [50.0, -50.0])
def test_what_was_rewarded_becomes_likelier_and_what_was_punished_less(folder, reward):
    answered = episode([step(action=[7, 8], reward=reward)])
    config = run_config(minibatches=1, policy_lr=1e-4)
    models = exact_models(folder, config, join(), reference=folder)
    before = likelihood(models, [7, 8])
    run_update([answered], 0, models, config, join())
    assert np.sign(likelihood(models, [7, 8]) - before) == np.sign(reward)


def likelihood(models, answer):
    batch = build_batch([episode([step(action=answer)])])
    with torch.no_grad():
        logprobs, _ = models.policy.model(collate(batch.segments[0], torch.device("cpu")), 1.0)
    return float(logprobs.sum())


def test_swapping_behaviour_for_proximal_moves_the_out_of_range_fraction(folder):
    """Ratios are against the proximal policy: behaviour log-probs that are far off do not clip."""
    config = run_config(minibatches=1)
    result, _ = updated(folder, config)
    assert abs(result.metrics["mismatch/k1"]) > 1e-2
    assert result.metrics["ratio/out_of_range"] == 0.0
    against = run_config(
        minibatches=1,
        algorithm=AlgorithmConfig(ratio="behaviour", behaviour_weight="none", kl_coefficient=0.0),
    )
    swapped, _ = updated(folder, against)
    assert swapped.metrics["ratio/out_of_range"] > 0.5


def test_a_critic_free_algorithm_has_no_critic(folder):
    algorithm = AlgorithmConfig(credit="group", ratio="token", kl_coefficient=0.0)
    config = run_config(minibatches=2, algorithm=algorithm)
    grouped = [
        msgspec.structs.replace(one, group_id=f"group-{number // 4}", member=number % 4)
        for number, one in enumerate(EPISODES)
    ]
    result, models = updated(folder, config, grouped)
    assert models.critic is None
    assert models.reference is None
    assert result.actions.value is None
    assert result.minibatches[0].critic_loss is None
    assert not any(name.startswith("critic/") for name in result.metrics)
    assert "values" not in result.phases


def test_a_token_critic_is_read_before_every_token(folder):
    algorithm = AlgorithmConfig(credit="token_gae", ratio="token", clip_low=0.2, clip_high=0.2)
    result, _ = updated(folder, run_config(minibatches=2, algorithm=algorithm))
    boundary, _ = updated(folder, run_config(minibatches=2))
    np.testing.assert_allclose(result.actions.value, boundary.actions.value, rtol=1e-12)
    assert result.minibatches[0].critic_grad_norm != boundary.minibatches[0].critic_grad_norm


def test_an_unusable_batch_changes_nothing(folder):
    config = run_config(token_budget=5)
    models = exact_models(folder, config, join(), reference=folder)
    before = {name: tensor.clone() for name, tensor in models.policy.state().items()}
    with pytest.raises(ValueError, match="token budget"):
        run_update(EPISODES, 0, models, config, join())
    assert all(torch.equal(tensor, before[name]) for name, tensor in models.policy.state().items())


def test_learning_rates_go_on_from_update_to_update():
    config = run_config(
        updates=3,
        minibatches=2,
        policy_lr=1.0,
        policy_warmup_steps=4,
        policy_final_lr_factor=0.5,
    )
    rates = [policy_learning_rate(config, version, n) for version in range(3) for n in range(2)]
    assert rates == pytest.approx([0.25, 0.5 * 0.9, 0.75 * 0.8, 0.7, 0.6, 0.5])
