"""What `capo check` tells of an algorithm: every part, every change, and what a change misses."""

from typing import Any

import msgspec
import pytest

from capo.configs.algorithm_text import algorithm_lines, changes_without_effect
from capo.configs.algorithms import AlgorithmConfig, resolve
from capo.configs.presets import PRESETS


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_has_a_line_per_part(preset: str) -> None:
    lines = algorithm_lines(resolve(preset))
    assert lines[0] == f"preset: {preset}"
    assert {line.split(":")[0] for line in lines} == {
        "preset", "credit", "ratio", "clipping", "aggregation", "KL", "behaviour", "critic",
    }  # fmt: skip


def test_what_differs_from_the_preset_is_named_beside_it() -> None:
    mixed = resolve({"preset": "gigpo", "ratio": "calibrated", "centre": True, "clip": 1e-3})
    assert algorithm_lines(mixed)[0].startswith("preset: gigpo with ratio=calibrated, ")


@pytest.mark.parametrize(
    ("raw", "silent"),
    [
        ({"preset": "grpo", "lam": 0.5, "clip": 0.1}, "lam=0.5"),
        ({"preset": "brace", "lam": 0.5}, "lam=0.5"),
        ({"preset": "ppo", "alpha": 1.0, "lam": 0.9}, "alpha=1.0"),
        ({"preset": "grpo", "behaviour_cap": 3.0}, "behaviour_cap=3.0"),
        ({"reject_high": 3.0, "trace_steps": 3}, "trace_steps=3, reject_high=3.0"),
        ({"preset": "dapo", "kl_estimator": "k2"}, "kl_estimator=k2"),
        ({"alpha": 1.0, "lam": 0.9, "behaviour_cap": 3.0}, ""),
    ],
)
def test_changes_that_nothing_reads_are_told(raw: Any, silent: str) -> None:
    assert ", ".join(changes_without_effect(resolve(raw))) == silent
    told = [line for line in algorithm_lines(resolve(raw)) if line.startswith("without effect")]
    assert told == ([f"without effect in this composition: {silent}"] if silent else [])


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_description_tells_of_every_change_that_is_read(preset: str) -> None:
    """Whatever is changed shows in a line of its part, or is said to be without effect."""
    before = resolve(preset)
    for field in msgspec.structs.fields(AlgorithmConfig):
        value = getattr(before, field.name)
        if isinstance(value, bool):
            changed = msgspec.structs.replace(before, **{field.name: not value})
        elif isinstance(value, int | float):
            changed = msgspec.structs.replace(before, **{field.name: value + 0.125})
        else:
            continue
        if field.name in ("drop_flat_groups", "history_length", "trace_steps"):
            continue
        after = algorithm_lines(changed)
        assert after[1:] != algorithm_lines(before)[1:], field.name
