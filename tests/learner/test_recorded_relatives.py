"""The parts of CAPO's relatives against the recorded cases 16 and 26."""

from typing import Any

import numpy as np
import pytest
import torch

from capo.learner import credit_beliefs as beliefs
from capo.learner import credit_relatives as relatives
from capo.learner.ragged import action_sums
from tests.recorded import FP32, Rows, cases, close, numbered, vector


@pytest.mark.parametrize("case", cases("16"))
def test_agent_opsd(case: dict[str, Any]) -> None:
    given, expected, params = case["inputs"], case["outputs"], case["params"]
    rows = Rows(given["response_mask"])
    episodes = numbered(given["traj_uid"])
    order = torch.from_numpy(np.lexsort((np.asarray(given["turn_step"]), episodes.numpy())))
    inverse, episode_of_action = order.argsort(), episodes[order]
    uid = numbered(given["uid"])
    last = torch.zeros(int(episodes.max()) + 1, dtype=torch.int64)
    last[episodes] = torch.arange(len(episodes))
    scores, groups = vector(given["episode_rewards"])[last], uid[last]
    first_row_rewards = torch.tensor(given["token_level_rewards"], dtype=torch.float64).sum(1)
    outcome = vector(given["seq_advantage_per_row"])[order]
    gaps = rows.flat(given["teacher_log_probs"]) - rows.flat(given["student_log_probs"])
    evidence = action_sums(gaps, rows.action_of_token, rows.num_actions)[order]
    priors = vector(expected["v0"])[last]
    if bool((first_row_rewards == vector(given["episode_rewards"])).all()):
        close(beliefs.prior_success(scores, groups), priors, **FP32)

    steps = beliefs.belief_steps(evidence, episode_of_action, priors)
    # The recorded centred form also lets older evidence decay.
    centred = beliefs.belief_steps(evidence, episode_of_action, priors, centre=True, decay=0.9)
    common: Any = (steps, outcome, episode_of_action, params["mult_band"], params["mult_lambda"])
    found = {
        "telescoping": beliefs.telescoped(steps, episode_of_action, priors, scores),
        "centered": beliefs.telescoped(centred, episode_of_action, priors, scores),
        "anchored_groupnorm": beliefs.anchored(steps, outcome, uid[order]),
        "belief_mult_signed": beliefs.multiplied(*common, signed=True),
        "belief_mult_magnitude": beliefs.multiplied(*common, signed=False),
        "tether": beliefs.tethered(
            evidence / rows.lengths[order],
            outcome,
            params["tether_band"],
            params["tether_lambda"],
        ),
    }
    for name, advantages in found.items():
        close(advantages[inverse], rows.first(expected[name]), **FP32)


def _case(name: str) -> list[Any]:
    return [one for one in cases("26") if one.id == name or one.values == (None,)]


@pytest.mark.parametrize("case", _case("spo_pp_norm"))
def test_token_weighted_standardisation(case: dict[str, Any]) -> None:
    found = relatives.token_weighted_standardised(
        vector(case["inputs"]["advantages"]),
        vector(case["inputs"]["lengths"]),
        case["params"]["eps"],
    )
    close(found, case["outputs"]["normalised"])


@pytest.mark.parametrize("case", _case("trace"))
def test_trace(case: dict[str, Any]) -> None:
    params = case["params"]
    found = relatives.trace_advantages(
        vector(case["inputs"]["ell"]),
        case["inputs"]["A_out"],
        params["gamma"],
        params["K"],
        params["w"],
        params["fill"],
    )
    close(found, case["outputs"]["adv"])


@pytest.mark.parametrize("case", _case("trial"))
def test_hindsight_weights_and_their_controls(case: dict[str, Any]) -> None:
    given, expected = case["inputs"], case["outputs"]
    rows = Rows(given["mask"])
    found = relatives.hindsight_weights(
        rows.flat(given["log_prob"]),
        rows.flat(given["hindsight_log_prob"]),
        rows.action_of_token,
        rows.num_actions,
        case["params"]["clip"],
    )
    close(found, expected["real"])
    close(found[torch.tensor(given["perm"])], expected["permuted"])
    close((found * rows.lengths).sum() / rows.lengths.sum(), 1.0)


@pytest.mark.parametrize("case", _case("triage"))
def test_role_bonus(case: dict[str, Any]) -> None:
    found = relatives.with_role_bonus(
        vector(case["inputs"]["advantages"]), case["inputs"]["roles"], case["params"]["lam"]
    )
    close(found, case["outputs"]["adv"])


def test_an_unknown_role_is_named() -> None:
    with pytest.raises(ValueError, match="Unknown role 'lucky'"):
        relatives.with_role_bonus(vector([1.0]), ["lucky"], 1.0)
