"""KL, value loss and behaviour corrections against the recorded cases 09-13."""

from typing import Any

import pytest
import torch
from torch import Tensor

from capo.configs.algorithms import resolve
from capo.learner import behaviour
from capo.learner.action_metrics import effective_sample_size
from capo.learner.aggregation import divisor, token_shares
from capo.learner.kl import kl_estimate, mismatch
from capo.learner.proximal import approximate_proximal
from capo.learner.value_loss import value_errors, value_loss
from tests import oracles_behaviour
from tests.recorded import Rows, cases, close, vector

FP32_WEIGHTS = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("case", cases("09"))
def test_kl_estimators_and_their_gradients(case: dict[str, Any]) -> None:
    given = case["inputs"]
    reference = vector(given["ref_log_prob"]).flatten()
    for name, expected in case["outputs"].items():
        current = vector(given["log_prob"]).flatten().requires_grad_()
        value = kl_estimate(current, reference, name)
        value.sum().backward()
        close(value.detach(), vector(expected["value"]).flatten())
        assert current.grad is not None
        close(current.grad, vector(expected["grad"]).flatten())


@pytest.mark.parametrize("case", cases("10"))
def test_value_loss(case: dict[str, Any]) -> None:
    given, expected, params = case["inputs"], case["outputs"], case["params"]
    rows = Rows(given["mask"])
    values = rows.flat(given["vpreds"]).requires_grad_()
    old, returns = rows.flat(given["values"]), rows.flat(given["returns"])
    clip = params["cliprange_value"]
    kind = {"token-mean": "token_mean", "seq-mean-token-mean": "action_mean"}[params["agg"]]
    shares = token_shares(kind, rows.lengths, epsilon=1e-8)[rows.action_of_token]
    by = divisor(kind, len(values), float((rows.lengths > 0).sum()), 1.0)
    loss = (value_errors(values, old, returns, clip) * shares).sum() / by
    loss.backward()
    close(loss.detach(), expected["loss"])
    assert values.grad is not None
    close(values.grad, rows.flat(expected["grad"]))
    whole = value_loss(values.detach(), old, returns, clip)
    close(whole.clipped_sum / len(values), expected["clipfrac"], rtol=1e-6, atol=1e-6)
    if kind == "token_mean":
        close(whole.loss_sum / len(values), expected["loss"], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("case", cases("11"))
def test_rollout_correction(case: dict[str, Any]) -> None:
    given = case["inputs"]
    rows = Rows(given["response_mask"])
    proximal, rollout = rows.flat(given["proximal_log_prob"]), rows.flat(given["rollout_log_prob"])
    ratios = behaviour.token_log_weights(proximal, rollout)
    index, num_actions = rows.action_of_token, rows.num_actions
    for name, expected in case["outputs"].items():
        metrics = {key.removeprefix("rollout_corr/"): v for key, v in expected["metrics"].items()}
        close(mismatch(rollout, proximal, "k1").mean(), metrics["kl"], **FP32_WEIGHTS)
        close(mismatch(rollout, proximal, "k3").mean(), metrics["k3_kl"], **FP32_WEIGHTS)
        if name.startswith("rs_"):
            rule = name.removeprefix("rs_").replace("seq_", "action_")
            kept = rows.flat(expected["mask"]) > 0
            statistic = _statistic(ratios, index, num_actions, rule)
            low, high = _bounds_around(statistic, kept, rule)
            found = behaviour.rejection_kept(ratios, index, num_actions, rule, low, high)
            assert found.tolist() == kept.tolist()
            dropped = 1.0 - found.double().mean()
            close(dropped, metrics["rollout_rs_masked_fraction"], **FP32_WEIGHTS)
            prefix = f"rollout_rs_{name.removeprefix('rs_')}"
            close(statistic.mean(), metrics[f"{prefix}_mean"], **FP32_WEIGHTS)
            close(statistic.max(), metrics[f"{prefix}_max"], **FP32_WEIGHTS)
            continue
        scope, method, *bounds = name.split("_")
        normalise = bounds[-1] == "bnorm"
        limits = [float(one) for one in bounds if one != "bnorm"]
        beyond, floor = ("mask", limits[0]) if method == "icepop" else ("truncate", None)
        logs = (
            ratios
            if scope == "token"
            else behaviour.action_log_weights(ratios, index, num_actions, "prod")
        )
        weights, kept, outside = behaviour.bounded_weights(logs, limits[-1], floor, beyond)
        spoken = rows.lengths > 0 if scope == "seq" else torch.ones_like(kept)
        effective = weights * kept
        per_token = effective if scope == "token" else effective[index]
        size = effective_sample_size(per_token.numpy())
        close(size, metrics["rollout_is_eff_sample_size"], **FP32_WEIGHTS)
        if normalise:
            effective = behaviour.normalised(weights[spoken], kept[spoken]) * kept[spoken]
            per_token = effective if scope == "token" else _spread(effective, spoken)[index]
        close(per_token, rows.flat(expected["weights"]), **FP32_WEIGHTS)
        if "rollout_is_oob_ratio" in metrics:
            close(outside.double().mean(), metrics["rollout_is_oob_ratio"], **FP32_WEIGHTS)


@pytest.mark.parametrize("case", cases("12"))
@pytest.mark.parametrize(
    "name",
    [
        "mask_tok_ratio_5",
        "mask_tok_ratio_band",
        "clamp_tok_ratio_2",
        "mask_seq_ratio_mean",
        "clamp_seq_ratio_mean",
        "mask_seq_k3_mean",
        "seq_ratio_gspo_mask",
    ],
)
def test_decoupled_weights(case: dict[str, Any], name: str) -> None:
    """Thresholds are in a case's name; where they are not, they are read off what it kept."""
    given, expected = case["inputs"], case["outputs"][name]
    rows = Rows(given["mask"])
    index, num_actions = rows.action_of_token, rows.num_actions
    ratios = behaviour.token_log_weights(
        rows.flat(given["proximal_log_prob"]), rows.flat(given["behave_log_prob"])
    )
    target = rows.flat(expected["behave_imp_weight"])
    per_action = "seq_ratio" in name
    logs = (
        behaviour.action_log_weights(ratios, index, num_actions, "geo")[index]
        if per_action
        else ratios
    )
    kept = target > 0
    raw = logs.exp()
    named = float(name.rpartition("_")[2]) if name[-1].isdigit() else None
    if name.startswith("clamp"):
        cap = named or (float(target.max()) if bool((raw > target + 1e-4).any()) else 1e9)
        floor = float(target.min()) if bool((raw < target - 1e-4).any()) else None
        weights, _, outside = behaviour.bounded_weights(logs, cap, floor, "truncate")
        close(weights, target, **FP32_WEIGHTS)
    elif "k3" in name:
        statistic = _statistic(ratios, index, num_actions, "action_mean_k3")
        _, high = _bounds_around(statistic, kept, "action_mean_k3")
        found = behaviour.rejection_kept(ratios, index, num_actions, "action_mean_k3", 0.5, high)
        assert found.tolist() == kept.tolist()
        close(raw * found, target, **FP32_WEIGHTS)
        outside = ~found
    else:
        low, high = _weights_around(raw[kept])
        if named:
            low, high = 0.0, named
        weights, found, outside = behaviour.bounded_weights(logs, high, low, "mask")
        assert found.tolist() == kept.tolist()
        close(weights * found, target, **FP32_WEIGHTS)
    close(outside.double().mean(), expected["filtered_fraction"], **FP32_WEIGHTS)


@pytest.mark.parametrize("case", cases("12"))
def test_second_moment_mask(case: dict[str, Any]) -> None:
    given = case["inputs"]
    rows = Rows(given["mask"])
    ratios = behaviour.token_log_weights(
        rows.flat(given["proximal_log_prob"]), rows.flat(given["behave_log_prob"])
    )
    for threshold, expected in case["outputs"]["m2po_mask"].items():
        kept = behaviour.second_moment_kept(ratios, float(threshold))
        assert kept.tolist() == (rows.flat(expected) > 0).tolist()
    logs = ratios.tolist()
    strict = oracles_behaviour.mean_square(logs) / 2
    kept = behaviour.second_moment_kept(ratios, strict)
    assert 0 < int(kept.sum()) == oracles_behaviour.second_moment_kept(logs, strict) < len(logs)


@pytest.mark.parametrize("case", cases("12"))
def test_proximal_approximation(case: dict[str, Any]) -> None:
    given = case["inputs"]
    for name, expected in case["outputs"].items():
        if not name.startswith("prox_approx_current_version_"):
            continue
        version = int(name.rsplit("_", 1)[1])
        for method in ("loglinear", "linear", "rollout"):
            found = approximate_proximal(
                vector(given["log_prob"]),
                vector(given["behave_log_prob"]),
                vector(expected["versions"]),
                version,
                method,
            )
            close(found, expected[method], **FP32_WEIGHTS)


@pytest.mark.parametrize("case", cases("13"))
def test_masked_importance_sampling(case: dict[str, Any]) -> None:
    given, params = case["inputs"], case["params"]
    lengths = [len(row) for row in given["loss_masks"]]
    width = max(lengths)
    rows = Rows([row + [0.0] * (width - len(row)) for row in given["loss_masks"]])

    def flat(name: str) -> Tensor:
        return rows.flat([row + [0.0] * (width - len(row)) for row in given[name]])

    index, num_actions = rows.action_of_token, rows.num_actions
    ratios = behaviour.token_log_weights(flat("train_log_probs"), flat("rollout_log_probs"))
    cap, floor = params["tis_upper_bound"], params["tis_lower_bound"]
    kinds = {"token": None, "seq": "prod", "geo": "geo"}
    for name, expected in case["outputs"].items():
        mode, scope, *rest = name.split("_")
        kind = kinds[scope]
        logs = (
            ratios
            if kind is None
            else behaviour.action_log_weights(ratios, index, num_actions, kind)[index]
        )
        target_kept = _joined(expected["masks"], given["loss_masks"]) > 0
        target = _joined(expected["weights"], given["loss_masks"])
        if mode == "mask":
            # The bounds are the truncation's, but those of the geometric mask are not named.
            low, high = (floor, cap) if kind is None else _weights_around(logs.exp()[target_kept])
            weights, kept, _ = behaviour.bounded_weights(logs, high, low, "mask")
        else:
            bound = floor if mode == "clip" else None
            weights, kept, _ = behaviour.bounded_weights(logs, cap, bound, "truncate")
        if "rs" in rest:
            geo = behaviour.action_log_weights(ratios, index, num_actions, "geo")[index]
            low, high = _weights_around(geo.exp()[target_kept])
            veto, _ = _weights_around(ratios.exp()[target_kept])
            algorithm = resolve(
                {
                    "ratio": "token",
                    "behaviour_weight": "token",
                    "behaviour_cap": cap,
                    "reject": "action_mean_k1",
                    # k1 is minus the log-ratio, so its bounds are those of 1 / ratio
                    "reject_low": 1 / high,
                    "reject_high": 1 / low,
                    "veto": veto,
                }
            )
            whole = behaviour.correct_behaviour(
                flat("train_log_probs"), flat("rollout_log_probs"), index, num_actions, algorithm
            )
            close(whole.token_weights, weights)
            kept = whole.token_kept & whole.action_kept[index]
        assert kept.tolist() == target_kept.tolist()
        if "bnorm" in rest:
            weights = behaviour.normalised(weights, kept)
        close(weights, target, **FP32_WEIGHTS)


def _statistic(ratios: Tensor, index: Tensor, num_actions: int, rule: str) -> Tensor:
    """The divergence per token that a rule compares, written out."""
    scope, _, estimator = rule.rpartition("_")
    per_token = {"k1": -ratios, "k2": ratios.square() / 2, "k3": ratios.expm1() - ratios}[estimator]
    if scope == "token":
        return per_token
    found = []
    for action in index.tolist():
        mine = per_token[index == action]
        reduce = {"action_sum": mine.sum, "action_mean": mine.mean, "action_max": mine.max}[scope]
        found.append(float(reduce()))
    return vector(found)


def _bounds_around(statistic: Tensor, kept: Tensor, rule: str) -> tuple[float, float]:
    """Bounds in a rule's own units that keep just what was kept."""
    low, high = float(statistic[kept].min()) - 1e-9, float(statistic[kept].max()) + 1e-9
    if rule.endswith("k1"):
        bounds = vector([low, high]).exp().tolist()
        return bounds[0], bounds[1]
    return 0.5, high


def _weights_around(kept: Tensor) -> tuple[float, float]:
    return float(kept.min()) * 0.999999, float(kept.max()) * 1.000001


def _spread(values: Tensor, rows: Tensor) -> Tensor:
    full = torch.zeros(len(rows), dtype=values.dtype)
    full[rows] = values
    return full


def _joined(ragged: list[list[float]], masks: list[list[float]]) -> Tensor:
    return vector(
        [
            value
            for row, mask in zip(ragged, masks, strict=True)
            for value, on in zip(row, mask, strict=True)
            if on > 0
        ]
    )
