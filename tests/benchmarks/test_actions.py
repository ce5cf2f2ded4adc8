"""Sums of z come back from what a run file keeps; synthetic z obeys the law it is made by."""

import msgspec
import numpy as np
import pytest
import torch

from benchmarks._actions import Actions, fractional_noise, from_run, synthetic, z_sums
from capo.configs.algorithms import resolve
from capo.configs.load import to_json
from capo.learner.ranks import join
from capo.learner.ratios import calibrated_log_ratio
from capo.learner.results import UpdateResult, encode
from capo.learner.run_file import RunFile
from capo.learner.update import run_update
from tests.factories import batch_of_episodes, run_config, tiny_policy
from tests.learner.exact import exact_models
from tests.learner.policy_cases import policy_inputs, run

LENGTHS = np.array([1, 2, 5, 17, 3])
ACTION_OF_TOKEN = torch.from_numpy(np.repeat(np.arange(len(LENGTHS)), LENGTHS))


@pytest.mark.parametrize(
    "algorithm",
    [
        *("capo", "capo_released", "ppo", "grpo", "gspo", "st_ppo", "gagpo", "cispo", "brace"),
        {"preset": "capo", "alpha": 0.25},
        {"preset": "capo", "alpha": 0.0, "centre": False},
    ],
    ids=str,
)
def test_the_recorded_log_ratio_gives_back_the_sum_of_z(algorithm) -> None:
    algorithm = resolve(algorithm)
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(len(ACTION_OF_TOKEN), generator=generator, dtype=torch.float64)
    new = old + 0.1 * torch.randn(old.shape, generator=generator, dtype=torch.float64) - 0.02
    inputs = policy_inputs(
        ACTION_OF_TOKEN, len(LENGTHS), old, algorithm, advantages=torch.tensor([1.0, -1, 2, 0, -3])
    )
    _, _, (loss,), statistics = run(new, inputs, algorithm)
    expected = np.add.reduceat((new - old).numpy(), np.cumsum(LENGTHS) - LENGTHS)
    found = z_sums(loss.log_ratio.numpy(), LENGTHS, float(statistics.mu), algorithm)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize("preset", ["gmpo", "sao", "estr", "m2po", "icepop"])
def test_an_algorithm_whose_record_does_not_determine_z_is_refused(preset: str) -> None:
    with pytest.raises(ValueError, match=f"{preset} run .* take another run"):
        z_sums(np.zeros(5), LENGTHS, 0.0, resolve(preset))


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_every_alpha_s_ratio_is_the_learner_s(alpha: float) -> None:
    z = np.random.default_rng(0).normal(-0.01, 0.1, LENGTHS.sum())
    actions = Actions(
        source="",
        length=LENGTHS,
        z_sum=np.add.reduceat(z, np.cumsum(LENGTHS) - LENGTHS),
        mu=np.full(len(LENGTHS), z.mean()),
        advantage=np.ones(len(LENGTHS)),
        clip_low=1e-3,
        clip_high=1e-3,
    )
    expected = calibrated_log_ratio(
        torch.from_numpy(z),
        ACTION_OF_TOKEN,
        torch.from_numpy(LENGTHS).double(),
        alpha,
        torch.tensor(z.mean(), dtype=torch.float64),
    )
    np.testing.assert_allclose(actions.log_ratio(alpha), expected.numpy(), rtol=1e-12)


@pytest.mark.parametrize("exponent", [0.6, 0.9, 1.0, 1.4])
def test_the_variance_of_sums_of_the_noise_follows_its_exponent(exponent: float) -> None:
    path = fractional_noise(exponent, 400_000, np.random.default_rng(1))
    for length in (1, 4, 32):
        sums = path.reshape(-1, length).sum(axis=1)
        assert sums.var() == pytest.approx(length**exponent, rel=0.06)


def test_independent_tokens_reproduce_the_paper_s_row_at_a_clip_of_1e_3() -> None:
    actions = synthetic(1.0, 5000, seed=0)
    assert (actions.length.min(), actions.length.max() > 500) == (1, True)
    out = np.abs(np.expm1(actions.log_ratio(0.5))) > 1e-3
    assert out.mean() == pytest.approx(0.50, abs=0.03)


def test_an_impossible_exponent_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\^2\.5"):
        fractional_noise(2.5, 10, np.random.default_rng(0))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory):
    """A real update of a tiny model in a run file, and the same with a policy that never moved."""
    folder = tiny_policy(tmp_path_factory.mktemp("policy"))
    config = run_config(minibatches=4)
    models = exact_models(folder, config, join(), reference=folder)
    result = run_update(batch_of_episodes(12), 0, models, config, join())
    still = msgspec.structs.replace(
        result,
        minibatches=tuple(
            msgspec.structs.replace(one, mu=0.0, log_ratio=np.zeros_like(one.log_ratio))
            for one in result.minibatches
        ),
    )
    run_dir = tmp_path_factory.mktemp("run") / "run"
    run_dir.mkdir()
    file = RunFile.create(run_dir, {"run_id": "test", "config": to_json(config).decode()})
    for version, one in enumerate((result, still)):
        file.begin_update(version, [])
        file.finish_update(version, seeds={}, metrics=one.metrics, result=encode(one))
    file.close()
    return run_dir, result


def test_a_recorded_update_gives_the_z_that_its_metrics_were_made_from(recorded) -> None:
    run_dir, result = recorded
    result: UpdateResult
    actions = from_run(run_dir, [0])
    moved = np.concatenate([one.actions for one in result.minibatches[1:]])
    np.testing.assert_array_equal(actions.length, result.actions.length[moved])
    np.testing.assert_array_equal(actions.advantage, result.actions.advantage[moved])
    mean = actions.z_sum.sum() / result.actions.length.sum()  # of the first minibatch it is 0
    assert mean == pytest.approx(result.metrics["ratio/mu"], rel=1e-9)
    log_ratio = np.concatenate([one.log_ratio for one in result.minibatches[1:]])
    np.testing.assert_allclose(actions.log_ratio(0.5), log_ratio, rtol=1e-9, atol=1e-12)
    out = np.abs(np.expm1(actions.log_ratio(0.5))) > actions.clip_high
    assert out.sum() == sum(one.out_of_range.sum() for one in result.minibatches)


def test_updates_can_be_put_together_and_the_clip_chosen(recorded) -> None:
    run_dir, _ = recorded
    one, both = from_run(run_dir, [0]), from_run(run_dir, [0, 1], clip=0.1)
    assert len(both.length) == len(one.length)  # nothing moved in the second
    assert (one.clip_low, both.clip_low, both.clip_high) == (1e-3, 0.1, 0.1)
    assert "updates 0, 1" in both.source


def test_an_update_that_moved_nothing_is_refused_with_a_remedy(recorded) -> None:
    run_dir, _ = recorded
    with pytest.raises(ValueError, match=r"did not move in update 1 .* another --update of 0\.\.1"):
        from_run(run_dir)
