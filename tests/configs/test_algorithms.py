"""Presets and their parts: what composes, what is refused, and with which sentence."""

import math
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

from capo.configs.algorithms import (
    AlgorithmConfig,
    check,
    critic_reads,
    needs_critic,
    needs_entropy,
    needs_groups,
    needs_logprob_statistics,
    needs_reference,
    needs_state_keys,
    resolve,
)
from capo.configs.load import load
from capo.configs.presets import PRESETS

ROOT = Path(__file__).parents[2]


def test_the_default_is_capo_as_in_the_paper() -> None:
    capo = resolve("capo")
    assert capo == AlgorithmConfig() == resolve({})
    assert (capo.gamma, capo.lam, capo.alpha, capo.centre) == (0.99, 1.0, 0.5, True)
    assert (capo.clip_low, capo.clip_high, capo.kl_coefficient) == (1e-3, 1e-3, 1e-3)
    assert (capo.aggregation, capo.whiten, capo.value_clip) == ("action_mean", "none", None)


def test_every_preset_of_the_papers_comparison_is_there() -> None:
    table_1 = {
        "capo", "capo_released", "ppo", "reinforce_pp", "grpo", "rloo", "gspo", "gigpo", "st_ppo",
        "gagpo",
    }  # fmt: skip
    besides = {
        "dapo", "dr_grpo", "cispo", "gmpo", "decoupled_ppo", "tis", "icepop", "mis", "m2po", "sao",
        "estr", "brace", "vtrace",
    }  # fmt: skip
    assert table_1 | besides <= set(PRESETS)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_resolves_and_survives_the_run_file(preset: str) -> None:
    algorithm = resolve(preset)
    check(algorithm)
    assert msgspec.json.decode(msgspec.json.encode(algorithm), type=AlgorithmConfig) == algorithm


@pytest.mark.parametrize(
    ("preset", "groups", "reads", "states"),
    [
        ("capo", False, "boundary", False),
        ("capo_released", False, "boundary", False),
        ("ppo", False, "token", False),
        ("st_ppo", False, "token", False),
        ("brace", False, "boundary", False),
        ("grpo", True, "none", False),
        ("reinforce_pp", True, "none", False),
        ("gigpo", True, "none", True),
        ("gagpo", True, "none", True),
    ],
)
def test_what_a_preset_needs(preset: str, groups: bool, reads: str, states: bool) -> None:
    algorithm = resolve(preset)
    assert needs_groups(algorithm) is groups
    assert needs_critic(algorithm) is not groups
    assert critic_reads(algorithm) == reads
    assert needs_state_keys(algorithm) is states


def test_what_costs_a_model_or_a_pass_is_asked_for_only_where_needed() -> None:
    assert needs_reference(resolve("capo"))
    assert not needs_reference(resolve({"kl_coefficient": 0.0}))
    assert not needs_reference(resolve("dapo"))
    assert needs_entropy(resolve("estr"))
    assert not needs_entropy(resolve("capo"))
    assert needs_logprob_statistics(resolve("capo"))
    assert needs_logprob_statistics(resolve("st_ppo"))
    assert not needs_logprob_statistics(resolve({"centre": False}))
    assert not needs_logprob_statistics(resolve("grpo"))


def test_any_part_can_be_overridden() -> None:
    mixed = resolve({"preset": "gigpo", "ratio": "calibrated", "centre": True, "clip": 1e-3})
    assert (mixed.credit, mixed.ratio, mixed.clip_low, mixed.clip_high) == (
        "gigpo",
        "calibrated",
        1e-3,
        1e-3,
    )


def test_one_clip_sets_both_sides_and_excludes_the_sides() -> None:
    algorithm = resolve({"preset": "capo", "clip": 0.01})
    assert (algorithm.clip_low, algorithm.clip_high) == (0.01, 0.01)
    with pytest.raises(ValueError, match="either"):
        resolve({"preset": "capo", "clip": 0.01, "clip_high": 0.02})


OFF = {"preset": "ppo", "dual_clip": "none", "value_clip": "none", "clipping": "cispo"}


def test_none_switches_off_what_a_preset_sets() -> None:
    assert (resolve("ppo").dual_clip, resolve("ppo").value_clip) == (3.0, 0.5)
    algorithm = resolve(OFF)
    assert (algorithm.dual_clip, algorithm.value_clip) == (None, None)
    assert resolve({"behaviour_weight": "none"}).behaviour_weight == "none"


@pytest.mark.parametrize("raw", [*sorted(PRESETS), OFF], ids=str)
def test_a_table_that_states_everything_is_read_back_as_it_is(raw: Any) -> None:
    """As a resumed run and a replay read what was recorded: what is off has no key there."""
    algorithm = resolve(raw)
    stated = {k: v for k, v in msgspec.to_builtins(algorithm).items() if v is not None}
    assert resolve(stated) == algorithm


def test_what_is_said_about_react_can_be_done() -> None:
    with pytest.raises(ValueError, match="prompting without training") as refused:
        resolve("react")
    (advice,) = re.findall(r"`(capo run .*)`", str(refused.value))
    assert advice in (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    command, action, _, *rest = shlex.split(advice)
    assert (command, action, rest[::2]) == ("capo", "run", ["--set"] * (len(rest) // 2))
    config = load(ROOT / "configs" / "quickstart.toml", rest[1::2])
    assert config.updates == 0
    assert config.evaluation.modes == ("greedy",)
    assert config.evaluation.games > 0
    assert (config.evaluation.before, config.evaluation.after) == (True, False)  # played once


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ("gipgo", "Unknown algorithm 'gipgo'; did you mean 'gigpo'?"),
        ("react", "prompting without training"),
        ({"gama": 0.9}, "Unknown key 'algorithm.gama'; did you mean 'gamma'?"),
        ({"gamma": "high"}, "gamma: Expected float, got str"),
        ({"gamma": 1.5}, r"gamma must lie in \[0, 1\], got 1.5"),
        ({"alpha": 2.0}, "alpha must lie"),
        ({"clip": -0.1}, "clip_low must not be negative"),
        ({"dual_clip": 0.5}, "dual_clip must be above 1"),
        ({"behaviour_cap": 0.0}, "behaviour_cap must be positive"),
        ({"behaviour_floor": 3.0}, "behaviour_floor 3 must be below behaviour_cap 2"),
        ({"veto": 0.0}, "veto must be positive"),
        ({"behaviour_weight": "token"}, "cannot multiply a ratio per action"),
        ({"clipping": "cispo"}, "works on token ratios; set ratio = 'token'"),
        ({"preset": "cispo", "dual_clip": 3.0}, "dual_clip belongs to clipping 'clip'"),
        ({"clip_bias": "one_plus"}, "measured before mu is known; set centre = false"),
        ({"preset": "sao", "behaviour_weight": "geo"}, "already divides by the behaviour policy"),
        ({"drop_flat_groups": True}, "needs group credit, but 'action_gae' uses a critic"),
        ({"preset": "grpo", "value_clip": 0.5}, "needs a critic, but credit 'group' has none"),
        ({"reject": "token_k1", "reject_low": 3.0}, "reject_high 2 must be above reject_low 3"),
        ({"clip_low": 1.5}, "leaves no ratio below 1 to clip"),
        ({"clip_high": math.inf}, "clip_high must be a finite number, got inf"),
        ({"preset": "hgpo", "history_power": math.nan}, "history_power must be a finite number"),
        ({"preset": "ppo", "clipping": "cispo"}, "not 'cispo'; set dual_clip = 'none'"),
        ({"preset": "capo_released", "credit": "rloo"}, "has none; set value_clip = 'none'"),
        ({"veto": "off"}, 'veto: Expected float or "none", got str'),
        ({"veto": 2.0}, "veto must be below 1, the weight of what the policy itself sampled"),
        ({"behaviour_cap": 0.5}, r"bounds 0\.\.0.5 .* must contain 1"),
        ({"behaviour_floor": 1.5}, r"bounds 1.5\.\.2 .* must contain 1"),
        ({"reject": "token_k1", "reject_low": 1.5}, r"bounds 1.5\.\.2 .* must contain 1"),
        ({"reject": "action_sum_k1", "reject_high": 0.9}, r"bounds 0.5\.\.0.9 .* must contain 1"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(raw: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        resolve(raw)
