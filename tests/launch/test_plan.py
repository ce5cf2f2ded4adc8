"""What `capo check` says that a run will need."""

import re

import pytest

from capo.configs.load import load
from capo.launch.plan import plan_lines

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def learner_bytes(*overrides: str) -> float:
    [line] = [
        line for line in plan_lines(load("quickstart", overrides)) if "learner memory" in line
    ]
    number, unit = re.search(r"learner memory ([\d.]+) (\w+)", line).groups()
    return float(number) * UNITS[unit]


def test_zero_shares_out_more_of_the_memory_with_every_stage():
    alone = learner_bytes()
    by_stage = [
        learner_bytes("learner.ranks=4", f"learner.zero_stage={stage}") for stage in range(4)
    ]
    assert by_stage[0] == alone
    assert by_stage == sorted(by_stage, reverse=True)
    assert by_stage[3] == pytest.approx(alone / 4, rel=0.02)


def test_a_learner_keeps_float32_whatever_the_engines_compute_in():
    assert learner_bytes('model.dtype="bfloat16"') == learner_bytes('model.dtype="float32"')


@pytest.mark.parametrize(
    ("overrides", "idle"),
    [
        (["learner.minibatches=1"], True),
        (["learner.minibatches=1", "algorithm=grpo"], True),
        (["learner.minibatches=1", "learner.epochs=2"], False),
        (["learner.minibatches=2"], False),
        (["learner.minibatches=1", "algorithm=sao"], False),  # against the behaviour policy
    ],
)
def test_it_says_that_clipping_does_nothing_in_the_only_step_of_an_update(
    overrides: list[str], idle: bool
):
    lines = plan_lines(load("quickstart", overrides))
    assert any("clipping does nothing" in line for line in lines) is idle
