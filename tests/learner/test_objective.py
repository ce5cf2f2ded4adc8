"""The policy's loss: slow definitions, analytic gradients, and however a minibatch is cut."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from capo.configs.algorithms import needs_logprob_statistics, resolve
from capo.configs.presets import PRESETS
from capo.learner.objective import minibatch_statistics, policy_divisor, policy_loss
from capo.learner.policy_inputs import PolicyInputs
from tests import oracles
from tests.learner.policy_cases import Case, policy_inputs, run
from tests.recorded import close, vector

EXACT = {"rtol": 1e-9, "atol": 1e-12}
PLAIN: dict[str, Any] = {"kl_coefficient": 0.0, "behaviour_weight": "none"}


ragged = st.lists(st.integers(1, 9), min_size=1, max_size=8)
seeds = st.integers(0, 2**31)
presets = st.sampled_from(sorted(PRESETS))


@given(
    lengths=ragged, seed=seeds, alpha=st.sampled_from([0.0, 0.25, 0.5, 1.0]), centre=st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_capo_is_the_papers_loss_and_gradient(
    lengths: list[int], seed: int, alpha: float, centre: bool
) -> None:
    case = Case(lengths, seed)
    algorithm = resolve({"alpha": alpha, "centre": centre, "clip": 0.01, "kl_coefficient": 0.0})
    inputs = case.inputs(algorithm)
    value, gradient, (loss,), statistics = run(case.current, inputs, algorithm)
    z = case.rows(case.current - case.proximal)
    mu = oracles.batch_mean(z) if centre else 0.0
    weights = [
        min(math.exp(sum(row) / len(row)), 2.0) for row in case.rows(case.proximal - case.behaviour)
    ]
    arguments: Any = (z, case.advantages.tolist(), alpha, mu, 0.01, weights)
    close(value, oracles.capo_loss(*arguments), **EXACT)
    expected = [slope for row in oracles.capo_gradient(*arguments) for slope in row]
    close(gradient, expected, **EXACT)
    close(loss.log_ratio.exp(), [oracles.calibrated_ratio(row, alpha, mu) for row in z], **EXACT)
    assert math.isclose(float(statistics.mu), oracles.batch_mean(z), abs_tol=1e-12)


@given(
    lengths=ragged,
    seed=seeds,
    aggregation=st.sampled_from(["token_mean", "action_mean", "action_sum", "action_sum_norm"]),
)
@settings(max_examples=40, deadline=None)
def test_token_ratios_under_every_aggregation(
    lengths: list[int], seed: int, aggregation: str
) -> None:
    case = Case(lengths, seed, scale=0.2)
    algorithm = resolve(
        {
            **PLAIN,
            "ratio": "token",
            "clip": 0.1,
            "aggregation": aggregation,
            "length_norm": 7.0,
        }
    )
    inputs = case.inputs(algorithm, advantages=None, token_advantages=case.token_advantages)
    value, _, _, _ = run(case.current, inputs, algorithm)
    expected = oracles.token_surrogate(
        case.rows(case.current - case.proximal),
        case.rows(case.token_advantages),
        0.1,
        aggregation,
        7.0,
    )
    close(value, expected, **EXACT)


@given(lengths=ragged, seed=seeds, preset=presets, cut=st.sampled_from([1, 2, 7]))
@settings(max_examples=150, deadline=None)
def test_microbatches_and_order_change_nothing(
    lengths: list[int], seed: int, preset: str, cut: int
) -> None:
    case = Case(lengths, seed)
    algorithm = resolve(preset)
    inputs = case.inputs(algorithm)
    whole_value, whole_gradient, (whole,), _ = run(case.current, inputs, algorithm)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(lengths), generator=generator)
    parts = [*order.tensor_split(cut)]  # some are empty when there are fewer actions than parts
    value, gradient, losses, _ = run(case.current, inputs, algorithm, parts)
    close(value, whole_value, **EXACT)
    close(gradient, whole_gradient, **EXACT)
    columns = ("log_ratio", "z_sum", "kept_tokens", "units", "out_of_range", "active", "clamped")
    for name in columns:
        joined = torch.cat([getattr(loss, name) for loss in losses])
        close(joined, getattr(whole, name)[order], **EXACT)


@given(lengths=ragged, seed=seeds, preset=presets)
@settings(max_examples=60, deadline=None)
def test_actions_without_tokens_change_nothing(lengths: list[int], seed: int, preset: str) -> None:
    case = Case(lengths, seed)
    algorithm = resolve(preset)
    value, gradient, _, _ = run(case.current, case.inputs(algorithm), algorithm)
    padded = policy_inputs(
        case.index,
        len(lengths) + 3,
        case.proximal,
        algorithm,
        advantages=torch.cat([case.advantages, vector([1.0, -1.0, 0.0])]),
        behaviour=case.behaviour,
        reference=case.reference,
        entropies=case.entropies,
    )
    padded_value, padded_gradient, _, _ = run(case.current, padded, algorithm)
    close(padded_value, value, **EXACT)
    close(padded_gradient, gradient, **EXACT)


@given(lengths=ragged, seed=seeds, preset=presets)
@settings(max_examples=60, deadline=None)
def test_gradient_is_that_of_the_loss(lengths: list[int], seed: int, preset: str) -> None:
    """Central differences along a random direction, with everything detached held fixed.

    CISPO and TV (gradient of log pi under a frozen weight), GSPO's and ST-PPO's per-token gradient
    and the straight-through form of a frozen mu are no derivative of the printed loss.
    """
    algorithm = resolve(preset)
    if algorithm.clipping in ("cispo", "tv") or algorithm.ratio == "sequence":
        return
    case = Case(lengths, seed, scale=0.05)
    inputs = case.inputs(algorithm)
    _, gradient, _, statistics = run(case.current, inputs, algorithm)
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(len(case.current), generator=generator, dtype=torch.float64)
    step = 1e-7

    def at(offset: float) -> tuple[float, Tensor, Tensor]:
        loss = policy_loss(case.current + offset * direction, inputs, statistics, algorithm)
        value = float(loss.loss_sum) / policy_divisor(statistics, algorithm)
        return value, loss.active, loss.units

    (upper, active_up, units_up), (lower, active_down, units_down) = at(step), at(-step)
    if not (torch.equal(active_up, active_down) and torch.equal(units_up, units_down)):
        return  # the step crossed a kink
    slope = (upper - lower) / (2 * step)
    assert math.isclose(slope, float(gradient @ direction), rel_tol=1e-4, abs_tol=1e-6)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_nothing_moves_nothing_clips_before_the_first_step(preset: str) -> None:
    """At z = 0 every ratio is 1, nothing is out of range, and the gradient is the plain policy
    gradient: non-zero, and the same whether statistics saw the log-probs or were told z = 0."""
    case = Case([4, 1, 7], seed=3)
    algorithm = resolve({"preset": preset, "kl_coefficient": 0.0})
    behaviour = case.proximal
    inputs = case.inputs(algorithm, behaviour=behaviour)
    _, gradient, (loss,), statistics = run(case.proximal, inputs, algorithm)
    assert torch.equal(loss.log_ratio, torch.zeros(3, dtype=torch.float64))
    assert float(loss.out_of_range.sum()) == 0.0
    assert float(loss.active.sum()) == 0.0
    assert float(statistics.mu) == 0.0
    assert float(gradient.abs().min()) > 0.0
    told = minibatch_statistics(None, inputs, algorithm)
    close(told.sums, statistics.sums)


def test_at_the_proximal_policy_capos_gradient_is_the_policy_gradient_over_root_length() -> None:
    case = Case([4, 1, 9], seed=5)
    algorithm = resolve(PLAIN)
    _, gradient, _, _ = run(case.proximal, case.inputs(algorithm), algorithm)
    root = torch.tensor(case.lengths, dtype=torch.float64).sqrt()
    close(gradient, (-case.advantages / root / 3)[case.index], **EXACT)


def test_a_single_token_action_has_the_ordinary_ratio() -> None:
    case = Case([1, 1, 1], seed=1)
    algorithm = resolve(PLAIN)
    _, _, (loss,), _ = run(case.current, case.inputs(algorithm), algorithm)
    close(loss.log_ratio, case.current - case.proximal, **EXACT)


@given(seed=seeds, preset=presets, size=st.sampled_from([30.0, 1e3, 1e6]))
@settings(max_examples=60, deadline=None)
def test_huge_log_ratios_are_clamped_counted_and_finite(
    seed: int, preset: str, size: float
) -> None:
    case = Case([3, 1, 5], seed)
    algorithm = resolve(preset)
    current = case.current.clone()
    current[0], current[4] = current[0] - size, current[4] - size
    behaviour = case.behaviour.clone()
    behaviour[2] = behaviour[2] - size
    inputs = case.inputs(algorithm, behaviour=behaviour)
    value, gradient, (loss,), _ = run(current, inputs, algorithm)
    assert math.isfinite(value)
    assert bool(gradient.isfinite().all())
    expected = [2.0, 0.0, 1.0] if algorithm.ratio == "behaviour" else [1.0, 0.0, 1.0]
    assert loss.clamped.tolist() == expected


def test_an_engine_that_reports_no_probability_does_no_harm() -> None:
    case = Case([3, 2], seed=0)
    behaviour = case.behaviour.clone()
    behaviour[1] = -math.inf
    for preset in sorted(PRESETS):
        algorithm = resolve(preset)
        inputs = case.inputs(algorithm, behaviour=behaviour)
        value, gradient, _, _ = run(case.current, inputs, algorithm)
        assert math.isfinite(value)
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_an_empty_part_gives_a_zero_that_has_a_gradient(preset: str) -> None:
    case = Case([2, 3], seed=0)
    algorithm = resolve(preset)
    empty = case.inputs(algorithm).select(torch.zeros(0, dtype=torch.int64))
    logprobs = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    statistics = minibatch_statistics(logprobs.detach(), empty, algorithm)
    loss = policy_loss(logprobs, empty, statistics, algorithm)
    assert float(loss.loss_sum.detach()) == 0.0
    loss.loss_sum.backward()
    assert policy_divisor(statistics, algorithm) >= 1.0


def test_dropped_actions_stay_in_the_divisor_and_uncounted_ones_leave_it() -> None:
    case = Case([4, 2, 3], seed=2)
    algorithm = resolve({**PLAIN, "centre": False})
    kept = torch.tensor([True, False, True])
    full = case.inputs(algorithm)
    _, all_gradient, _, _ = run(case.current, full, algorithm)
    dropped = _replaced(full, action_kept=kept)
    _, drop_gradient, (loss,), statistics = run(case.current, dropped, algorithm)
    rows = case.index == 1
    assert float(drop_gradient[rows].abs().sum()) == 0.0
    close(drop_gradient[~rows], all_gradient[~rows], **EXACT)
    assert statistics.num_actions == 3.0
    assert loss.units.tolist() == [1.0, 0.0, 1.0]
    uncounted = _replaced(full, counted=kept)
    _, left_gradient, _, statistics = run(case.current, uncounted, algorithm)
    close(left_gradient[~rows], all_gradient[~rows] * 3 / 2, **EXACT)
    assert statistics.num_actions == 2.0


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "action_mean", "action_sum", "action_sum_norm"]
)
def test_dropped_tokens_stay_in_the_divisor(aggregation: str) -> None:
    """Their own objective is gone; that of the action's other tokens counts no more for it."""
    case = Case([4, 2, 3], seed=2)
    algorithm = resolve({**PLAIN, "ratio": "token", "aggregation": aggregation, "clip": 0.2})
    full = case.inputs(algorithm)
    _, all_gradient, _, _ = run(case.current, full, algorithm)
    kept = torch.tensor([True, False, True, True, False, True, True, True, True])
    _, gradient, (loss,), _ = run(case.current, _replaced(full, token_kept=kept), algorithm)
    close(gradient, torch.where(kept, all_gradient, 0.0), **EXACT)
    assert loss.units.tolist() == [3.0, 1.0, 3.0]


def test_a_ratio_per_action_is_made_of_its_kept_tokens() -> None:
    """GSPO's form and the geometric mean agree on what a mask leaves of an action."""
    case = Case([4, 2, 3], seed=2)
    kept = torch.tensor([True, False, True, True, False, True, True, True, True])
    gradients = []
    for form in ({"ratio": "sequence"}, {"ratio": "calibrated", "alpha": 1.0, "centre": False}):
        algorithm = resolve({**PLAIN, **form, "clip": 0.2})
        masked = _replaced(case.inputs(algorithm), token_kept=kept)
        gradients.append(run(case.current, masked, algorithm)[1])
    close(*gradients, **EXACT)
    assert float(gradients[0][kept].abs().min()) > 0.0


def test_uncounted_actions_change_nothing_for_the_others() -> None:
    case = Case([4, 2, 3], seed=2)
    for preset in sorted(PRESETS):
        algorithm = resolve(preset)
        counted = torch.tensor([True, False, True])
        value, gradient, _, _ = run(
            case.current, case.inputs(algorithm, counted=counted), algorithm
        )
        without = case.inputs(algorithm).select(torch.tensor([0, 2]))
        rows = case.index != 1
        alone_value, alone_gradient, _, _ = run(case.current[rows], without, algorithm)
        close(value, alone_value, **EXACT)
        close(gradient[rows], alone_gradient, **EXACT)
        assert float(gradient[~rows].abs().sum()) == 0.0


def test_the_kl_term_holds_dropped_actions_too() -> None:
    case = Case([4, 2], seed=2)
    algorithm = resolve({"behaviour_weight": "none", "kl_coefficient": 0.5})
    inputs = _replaced(
        case.inputs(algorithm),
        action_kept=torch.tensor([False, True]),
        token_kept=torch.tensor([True, True, True, True, False, False]),
    )
    value, gradient, (loss,), _ = run(case.current, inputs, algorithm)
    log_r = case.reference - case.current
    k3 = (log_r.exp() - log_r - 1.0).split(case.lengths)
    expected = sum(float(row.mean()) for row in k3) / 2
    close(loss.kl_sum / 2, expected, **EXACT)
    close(value, 0.5 * expected, **EXACT)
    assert float(gradient.abs().min()) > 0.0


def test_the_entropy_normalised_mask_follows_the_current_policy() -> None:
    """A token at its behaviour log-prob when the batch began is dropped once the policy left it."""
    algorithm = resolve({**PLAIN, "estr_tau": 0.05})
    case = Case([3], seed=0)
    inputs = case.inputs(algorithm, behaviour=case.proximal, entropies=vector([1.0, 1.0, 1.0]))
    moved = case.proximal + vector([0.0, 0.3, 0.0])
    _, before, _, _ = run(case.proximal, inputs, algorithm)
    _, after, (loss,), _ = run(moved, inputs, algorithm)
    assert float(before.abs().min()) > 0.0
    assert float(after[1]) == 0.0
    close(loss.z_sum, [0.0])
    close(after[0], -case.advantages[0] / 2**0.5, **EXACT)


def test_mu_is_that_of_the_whole_minibatch_not_of_the_part() -> None:
    case = Case([5, 5], seed=4, scale=0.05)
    algorithm = resolve(PLAIN)
    inputs = case.inputs(algorithm)
    whole = minibatch_statistics(case.current, inputs, algorithm)
    part = inputs.select(torch.tensor([0]))
    alone = minibatch_statistics(case.current[:5], part, algorithm)
    by_whole = policy_loss(case.current[:5], part, whole, algorithm).log_ratio
    by_part = policy_loss(case.current[:5], part, alone, algorithm).log_ratio
    assert abs(float(by_whole - by_part)) > 1e-4


def test_mu_gives_no_gradient_from_one_action_to_another() -> None:
    case = Case([5, 5], seed=4)
    algorithm = resolve(PLAIN)
    inputs = case.inputs(algorithm, advantages=vector([1.0, 0.0]))
    _, gradient, _, _ = run(case.current, inputs, algorithm)
    assert float(gradient[5:].abs().sum()) == 0.0


def test_a_zero_advantage_never_counts_as_clipped() -> None:
    case = Case([5, 5], seed=4, scale=1.0)
    algorithm = resolve(PLAIN)
    inputs = case.inputs(algorithm, advantages=vector([0.0, 0.0]))
    _, gradient, (loss,), _ = run(case.current, inputs, algorithm)
    assert float(loss.out_of_range.sum()) > 0.0
    assert float(loss.active.sum()) == 0.0
    assert float(gradient.abs().sum()) == 0.0


def test_half_the_out_of_range_actions_are_clipped_when_advantages_are_independent() -> None:
    """The paper's table 4: out of range 48.7 %, active 24.5 % at 1e-3; token noise of sd 1.5e-3
    gives that row."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 200, (4000,), generator=generator)
    index = torch.arange(4000).repeat_interleave(lengths)
    z = 1.5e-3 * torch.randn(len(index), generator=generator, dtype=torch.float64)
    algorithm = resolve(PLAIN)
    inputs = policy_inputs(
        index,
        4000,
        torch.zeros_like(z),
        algorithm,
        advantages=torch.randn(4000, generator=generator, dtype=torch.float64),
    )
    _, _, (loss,), _ = run(z, inputs, algorithm)
    assert abs(float(loss.out_of_range.mean()) - 0.50) < 0.02
    assert abs(float(loss.active.mean()) - 0.25) < 0.02


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_single_precision_agrees_with_double(preset: str) -> None:
    case = Case([4, 1, 7, 30], seed=9)
    algorithm = resolve(preset)
    value, gradient, _, _ = run(case.current, case.inputs(algorithm), algorithm)
    single = Case([4, 1, 7, 30], seed=9)
    for name, held in vars(single).items():
        if isinstance(held, Tensor) and held.is_floating_point():
            setattr(single, name, held.float())
    found, found_gradient, _, _ = run(single.current, single.inputs(algorithm), algorithm)
    assert found_gradient.dtype == torch.float32
    close(found, value, rtol=1e-4, atol=1e-5)
    close(found_gradient, gradient, rtol=1e-3, atol=1e-5)


def test_statistics_need_logprobs_only_where_they_say_so() -> None:
    case = Case([4, 2], seed=0)
    for preset in sorted(PRESETS):
        algorithm = resolve(preset)
        inputs = case.inputs(algorithm)
        seen = minibatch_statistics(case.current, inputs, algorithm)
        told = minibatch_statistics(None, inputs, algorithm)
        if not needs_logprob_statistics(algorithm):
            value = policy_loss(case.current, inputs, seen, algorithm).loss_sum
            other = policy_loss(case.current, inputs, told, algorithm).loss_sum
            assert torch.equal(value, other)
        assert policy_divisor(seen, algorithm) == policy_divisor(told, algorithm)


def test_missing_inputs_are_named() -> None:
    case = Case([2, 2], seed=0)
    algorithm = resolve("capo")
    statistics = minibatch_statistics(None, case.inputs(algorithm), algorithm)
    bare = _replaced(case.inputs(algorithm), reference_logprobs=None)
    with pytest.raises(ValueError, match="KL term needs reference"):
        policy_loss(case.current, bare, statistics, algorithm)
    estr = resolve("estr")
    with pytest.raises(ValueError, match="needs the behaviour policy's entropies"):
        minibatch_statistics(None, case.inputs(estr, entropies=None), estr)
    with pytest.raises(ValueError, match="for 4 tokens"):
        policy_loss(case.current[:3], case.inputs(algorithm), statistics, algorithm)


def _replaced(inputs: PolicyInputs, **changes: Any) -> PolicyInputs:
    held = {name: getattr(inputs, name) for name in inputs.__struct_fields__}
    return PolicyInputs(**{**held, **changes})
