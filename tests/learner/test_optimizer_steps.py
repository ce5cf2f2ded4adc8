import math

import numpy as np
import pytest
import torch

from capo.configs.algorithms import AlgorithmConfig
from capo.learner.batch import build_batch
from capo.learner.minibatches import plan_minibatches
from capo.learner.objective import minibatch_statistics, policy_divisor, policy_loss
from capo.learner.optimizer_steps import ACTION_COLUMNS, critic_step, policy_step
from capo.learner.passes import read_values, score
from capo.learner.policy_inputs import PolicyInputs
from capo.learner.ranks import join
from tests.factories import batch_of_episodes, run_config, tiny_policy
from tests.learner.exact import exact_models, gradients

EPISODES = batch_of_episodes(7, seed=1)
LONGEST = max(
    len(placed.segment.token_ids)
    for segments in build_batch(EPISODES).segments
    for placed in segments
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The policy that moved, and the proximal one it moved from (also the reference)."""
    moved = tiny_policy(tmp_path_factory.mktemp("moved"), seed=0)
    before = tmp_path_factory.mktemp("before")
    from safetensors.torch import load_file, save_file

    weights = load_file(moved / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    nearby = {
        name: tensor + 3e-3 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in weights.items()
    }
    tiny_policy(before, seed=0)
    save_file(nearby, before / "model.safetensors", metadata={"format": "pt"})
    return moved, before


def one_step(folders, algorithm, token_budget):
    """A policy step away from the proximal policy, and a critic step, over the whole batch."""
    moved, before = folders
    config = run_config(algorithm=algorithm, token_budget=token_budget, max_grad_norm=0.0)
    ranks = join()
    batch = build_batch(EPISODES)
    models = exact_models(moved, config, ranks, reference=before)
    (minibatch,) = plan_minibatches(
        batch, ranks, minibatches=1, epochs=1, token_budget=token_budget, seed=0, version=0
    )
    inputs = policy_inputs(batch, minibatch, before, algorithm)
    policy = policy_step(
        models.policy, minibatch, inputs, algorithm, ranks, temperature=1.0, lr=1e-3, moved=True
    )
    values = read_values(models.critic.model, batch, "boundary", token_budget, ranks)
    critic = critic_step(
        models.critic,
        minibatch,
        values.readings,
        inputs.advantages,
        ranks,
        reads="boundary",
        num_readings=batch.num_actions,
        clip=0.5,
        lr=1e-3,
    )
    return len(minibatch.microbatches), models, policy, critic, values


def policy_inputs(batch, minibatch, before, algorithm):
    """Random credit, weights and masks against the proximal policy in `before`."""
    ranks = join()
    proximal = exact_models(before, run_config(), ranks, reference=before).policy.model
    rng = np.random.default_rng(0)
    actions, tokens = batch.num_actions, batch.num_tokens
    old = score(proximal, minibatch.microbatches, tokens, 1.0, ranks).logprobs
    advantages = torch.from_numpy(rng.normal(size=actions))
    owner = torch.from_numpy(batch.action_of_token)
    return PolicyInputs(
        action_of_token=owner,
        proximal_logprobs=old,
        behaviour_logprobs=torch.from_numpy(batch.behaviour_logprobs).double(),
        reference_logprobs=old - 0.1 if algorithm.kl_coefficient else None,
        advantages=advantages,
        token_advantages=advantages[owner],
        token_weights=torch.ones(tokens, dtype=torch.float64),
        token_kept=torch.from_numpy(rng.random(tokens) > 0.1),
        action_weights=torch.from_numpy(rng.random(actions) + 0.5),
        action_kept=torch.from_numpy(rng.random(actions) > 0.1),
        counted=torch.from_numpy(rng.random(actions) > 0.1),
    )


def batch_inputs(folders, algorithm):
    """The whole batch as one microbatch, in its order, and its inputs."""
    batch = build_batch(EPISODES)
    (minibatch,) = plan_minibatches(
        batch, join(), minibatches=1, epochs=1, token_budget=10_000, seed=0, version=0
    )
    (whole,) = minibatch.microbatches
    inputs = policy_inputs(batch, minibatch, folders[1], algorithm)
    return whole, inputs.select(whole.actions)


CLIP = {"clip_low": 5e-2, "clip_high": 5e-2}
ALGORITHMS = {
    "calibrated": AlgorithmConfig(**CLIP),
    "token ratios": AlgorithmConfig(ratio="token", **CLIP),
    "not centred": AlgorithmConfig(centre=False, alpha=1.0, kl_coefficient=0.0, **CLIP),
    "clipping bias": AlgorithmConfig(alpha=1.0, clip_bias="one_plus", **CLIP),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradient_do_not_depend_on_the_cut_into_microbatches(folders, name):
    algorithm = ALGORITHMS[name]
    counts, outcomes = [], []
    for token_budget in (10_000, None, LONGEST):
        budget = token_budget or _half()
        count, *outcome = one_step(folders, algorithm, budget)
        counts.append(count)
        outcomes.append(outcome)
    assert counts[0] == 1
    assert counts[1] == 2
    assert counts[2] >= 7
    models, policy, critic, values = outcomes[0]
    columns = dict(zip(ACTION_COLUMNS, policy.columns, strict=True))
    assert 0 < columns["out_of_range"].sum() < columns["units"].sum()  # both sides of the clip
    for other_models, other_policy, other_critic, other_values in outcomes[1:]:
        same(other_policy.loss, policy.loss)
        same(other_policy.kl, policy.kl)
        same(other_policy.mu, policy.mu)
        same(other_policy.grad_norm, policy.grad_norm)
        same(other_policy.columns, policy.columns)
        same(other_critic.loss, critic.loss)
        same(other_critic.clipped, critic.clipped)
        same(other_values.readings, values.readings)
        same(other_values.bootstraps, values.bootstraps)
        for engine, other in (
            (models.policy, other_models.policy),
            (models.critic, other_models.critic),
        ):
            expected = gradients(engine)
            assert any(gradient.abs().max() > 1e-4 for gradient in expected.values())
            for parameter, gradient in gradients(other).items():
                same(gradient, expected[parameter])


def test_gradient_is_that_of_a_plain_backward_over_the_whole_minibatch(folders):
    algorithm = ALGORITHMS["calibrated"]
    _, models, policy, _, _ = one_step(folders, algorithm, LONGEST)
    plain = exact_models(folders[0], run_config(algorithm=algorithm), join(), reference=folders[1])
    model = plain.policy.model
    whole, inputs = batch_inputs(folders, algorithm)
    logprobs, _ = model(whole, 1.0)
    statistics = minibatch_statistics(logprobs, inputs, algorithm)
    loss = policy_loss(logprobs, inputs, statistics, algorithm).loss_sum
    loss = loss / policy_divisor(statistics, algorithm)
    loss.backward()
    same(policy.loss, loss.detach())
    recorded = gradients(models.policy)
    for name, parameter in model.named_parameters():
        same(recorded[name], parameter.grad)
    squares = sum(float(gradient.square().sum()) for gradient in recorded.values())
    assert policy.grad_norm == pytest.approx(squares**0.5, rel=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing(folders):
    ranks = join()
    engine = exact_models(folders[0], run_config(), ranks, reference=folders[1]).policy
    before = {name: tensor.clone() for name, tensor in engine.state().items()}
    whole, _ = batch_inputs(folders, AlgorithmConfig())
    engine.backward(engine.forward(whole, 1.0)[0].sum() * float("nan"), 1.0, last=True)
    assert math.isnan(engine.step(1e-2))
    after = engine.state()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    engine.backward(engine.forward(whole, 1.0)[0].sum(), 1.0, last=True)
    assert math.isfinite(engine.step(1e-2))
    embeddings = "master.causal_lm.model.embed_tokens.weight"
    assert not torch.equal(before[embeddings], engine.state()[embeddings])


def same(one, other):
    torch.testing.assert_close(
        torch.as_tensor(one, dtype=torch.float64),
        torch.as_tensor(other, dtype=torch.float64),
        rtol=1e-9,
        atol=1e-11,
    )


def _half():
    """A budget that cuts the batch in two."""
    total = sum(
        len(placed.segment.token_ids)
        for segments in build_batch(EPISODES).segments
        for placed in segments
    )
    return total // 2 + LONGEST
