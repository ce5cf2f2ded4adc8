"""Every preset through a whole update of a tiny model: it learns, it is finite, it is measured."""

import math

import msgspec
import numpy as np
import pytest
import torch

from capo.configs.algorithms import needs_critic, needs_groups, needs_reference, resolve
from capo.configs.presets import PRESETS
from capo.learner.ranks import join
from capo.learner.update import run_update
from tests.factories import random_episode, run_config, tiny_policy
from tests.learner.exact import exact_models
from tests.metrics_page import undescribed

EVERYWHERE = {
    "ratio/out_of_range",
    "ratio/active",
    "ratio/mu",
    "ratio/log_w_p50",
    "mismatch/k1",
    "mismatch/k3/fresh",
    "weight/mean",
    "weight/effective_sample_size",
    "staleness/mean",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("policy"))


def group(number, size=4, reward=None):
    """Episodes of one task that share their first state; odd ones are longer. With a `reward`, all
    end with it and after as many steps."""
    episodes = []
    for member in range(size):
        played = random_episode(
            100 * number + member,
            num_steps=2 if reward is not None else 2 + member % 2,
            group_id=f"group-{number}",
        )
        steps = tuple(
            msgspec.structs.replace(
                step,
                state_key="start" if step.index == 0 else f"s{step.index}",
                entropies=np.full(len(step.action), 2.0, dtype=np.float32),
                reward=step.reward if reward is None else reward * (step.index == 1),
            )
            for step in played.steps
        )
        episodes.append(msgspec.structs.replace(played, steps=steps))
    return episodes


EPISODES = [*group(1), *group(2)]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_updates_the_policy_and_is_measured(folder, preset):
    algorithm = resolve(preset)
    config = run_config(algorithm=algorithm, minibatches=2, token_budget=60)
    models = exact_models(folder, config, join(), reference=folder)
    before = [weights.detach().clone() for weights in models.policy.model.parameters()]
    result = run_update(EPISODES, 0, models, config, join())
    after = list(models.policy.model.parameters())
    assert any(not np.array_equal(a.detach(), b) for a, b in zip(after, before, strict=True))
    assert all(bool(weights.isfinite().all()) for weights in after)
    assert set(result.metrics) >= EVERYWHERE
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert undescribed(result.metrics) == set()
    assert result.metrics["policy/grad_norm"] > 0
    assert ("critic/explained_variance" in result.metrics) is needs_critic(algorithm)
    assert (models.critic is not None) is needs_critic(algorithm)
    assert (models.reference is not None) is needs_reference(algorithm)
    first = result.minibatches[0]
    if algorithm.ratio != "behaviour":
        assert np.array_equal(first.log_ratio, np.zeros(len(first.actions)))
        assert first.active.sum() == 0


@pytest.mark.parametrize("reward", [0.0, 1.0], ids=["all_failed", "all_solved"])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_episodes_that_all_did_alike_do_no_harm(folder, preset, reward):
    """All is finite; what a group's comparison teaches is nothing, and nothing moves: there is no
    weight decay, and the policy is the reference, where the KL term is flat."""
    algorithm = resolve(preset)
    config = run_config(algorithm=algorithm, minibatches=2, token_budget=60)
    models = exact_models(folder, config, join(), reference=folder)
    engines = [engine for engine in (models.policy, models.critic) if engine is not None]
    before = [weights.detach().clone() for weights in models.policy.model.parameters()]
    episodes = [*group(1, 3, reward), *group(2, 3, reward)]
    result = run_update(episodes, 0, models, config, join())
    assert all(math.isfinite(value) for value in result.metrics.values())
    for one in result.minibatches:
        assert all(math.isfinite(value) for value in (one.mu, one.policy_loss, one.kl))
    for engine in engines:
        assert all(bool(tensor.isfinite().all()) for tensor in engine.state().values())
    if needs_groups(algorithm) and (algorithm.credit, reward) != ("g2po", 1.0):
        # G2PO also compares how much the steps of a solved episode gained with each other.
        assert result.metrics["policy/grad_norm"] < 1e-12
        for weights, old in zip(models.policy.model.parameters(), before, strict=True):
            torch.testing.assert_close(weights.detach(), old, rtol=0.0, atol=1e-12)
