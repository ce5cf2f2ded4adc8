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
