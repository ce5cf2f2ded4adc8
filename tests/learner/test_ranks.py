"""Two gloo processes against one, for every ZeRO stage."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from capo.learner.ranks import join
from capo.learner.results import compare, decode
from capo.learner.update import run_update
from tests.factories import tiny_policy
from tests.learner.rank_process import EPISODES, config, float32_models

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("rank_process.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    tiny_policy(folder / "policy")
    tiny_policy(folder / "untied", tied=False)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    models = float32_models(folder / "policy", config(0))
    return run_update(EPISODES, 0, models, config(0), join())


def run_ranks(folder, zero_stage, count=2):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    logs = [folder / f"rank-{rank}.log" for rank in range(count)]
    with ExitStack() as stack:
        processes = [
            subprocess.Popen(
                [sys.executable, SCRIPT, str(rank), str(count), str(folder), str(zero_stage)],
                env=environment,
                stdout=stack.enter_context(log.open("wb")),
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        for process in processes:
            stack.callback(process.wait)
            stack.callback(process.kill)
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(timeout=240) == 0, log.read_text()[-3000:]
    return [decode((folder / f"result-{zero_stage}-{rank}").read_bytes()) for rank in range(count)]


@pytest.mark.parametrize(
    "zero_stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2, 3))]
)
def test_two_ranks_update_like_one(folder, alone, zero_stage):
    first, second = run_ranks(folder, zero_stage)
    assert compare(first, second) == []  # every rank knows everything
    assert first.episode_ids == alone.episode_ids
    assert first.metrics["batch/microbatches"] < alone.metrics["batch/microbatches"]
    np.testing.assert_allclose(first.actions.value, alone.actions.value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first.actions.advantage, alone.actions.advantage, atol=1e-5)
    names = ("mu", "policy_loss", "kl", "critic_loss", "policy_grad_norm", "critic_grad_norm")
    for split, whole in zip(first.minibatches, alone.minibatches, strict=True):
        assert np.array_equal(split.actions, whole.actions)
        np.testing.assert_allclose(split.log_ratio, whole.log_ratio, atol=1e-4)
        for name in names:
            ours, theirs = getattr(split, name), getattr(whole, name)
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6), name
    files = {path.name for path in (folder / f"checkpoint-{zero_stage}" / "optimizer").iterdir()}
    assert files == {
        f"{model}-rank-{rank}-of-2.safetensors" for model in ("policy", "critic") for rank in (0, 1)
    }
    policy = folder / f"checkpoint-{zero_stage}" / "policy"
    assert AutoModelForCausalLM.from_pretrained(policy).num_parameters() > 0
