"""Replay: the recorded bits come out again, a change is noticed, and "what if" is answered."""

import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from capo.configs.schema import RolloutConfig
from capo.learner.replay import overridden, replay
from capo.learner.replay_text import replay_lines, verdict
from capo.learner.tiny_model import build_tokenizer
from capo.protocol.errors import CheckpointError, ConfigError, RunFileError
from tests.factories import batch_of_episodes, run_config, tiny_policy
from tests.learner.recorded_run import record

CONFIG = msgspec.structs.replace(
    run_config(minibatches=2, updates=5, policy_warmup_steps=3),
    rollout=RolloutConfig(max_action_tokens=64),
)
BATCHES = [batch_of_episodes(6, seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """Four updates, with a checkpoint of version 2."""
    folder = tmp_path_factory.mktemp("recorded")
    model = tiny_policy(folder / "policy")
    build_tokenizer(["go", "take"], model)
    run_dir = folder / "run"
    run_dir.mkdir()
    record(run_dir, CONFIG, model, BATCHES, every=2)
    shutil.rmtree(run_dir / "checkpoints" / "version-000004")
    return run_dir


@pytest.mark.parametrize(("version", "started_from"), [(0, 0), (1, 0), (2, 2), (3, 2)])
def test_every_update_comes_out_bit_for_bit(recorded, version, started_from):
    found = replay(recorded, version)
    assert found.started_from == started_from
    assert found.differences == ()
    assert found.diverged_at is None
    assert "bit for bit as recorded" in verdict(found)
    text = "\n".join(replay_lines(found))
    for quantity in ("advantage", "ratio", "mu", "policy loss", "policy gradient norm"):
        assert quantity in text
    assert " differ" not in text


def test_a_step_that_was_tampered_with_is_noticed(recorded, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(recorded, run_dir)
    connection = sqlite3.connect(run_dir / "run.sqlite")
    with connection:
        connection.execute(
            "UPDATE steps SET reward = reward + 1e-9 WHERE episode_id = "
            "(SELECT episode_id FROM episodes WHERE consumed_by = 2 LIMIT 1) AND step_index = 0"
        )
    connection.close()
    found = replay(run_dir, 2)
    assert found.differences
    assert "DIFFERENTLY" in verdict(found)
    assert any("advantage" in difference.name for difference in found.differences)
    assert replay(run_dir, 3).diverged_at == 2


def test_what_if_shows_both_numbers(recorded):
    found = replay(recorded, 3, ["algorithm.clip=0.5"])
    names = {difference.name.split("[")[0] for difference in found.differences}
    assert "minibatches" in names
    assert found.replayed.metrics["ratio/out_of_range"] == 0.0
    assert found.recorded.metrics["ratio/out_of_range"] > 0.0
    lines = list(replay_lines(found))
    header = next(line for line in lines if "recorded" in line)
    assert "with algorithm.clip=0.5" in header
    [row] = [line for line in lines if line.startswith("ratio/out_of_range ")]
    assert row.split()[1:] == [f"{found.recorded.metrics['ratio/out_of_range']:.6g}", "0"]


def test_what_if_leaves_the_updates_before_as_they_were(recorded):
    """So that the first minibatch, before any step, starts from the same weights."""
    found = replay(recorded, 3, ["learner.policy_lr=0.5"])
    assert found.diverged_at is None
    first = (found.recorded.minibatches[0], found.replayed.minibatches[0])
    assert first[0].policy_loss == first[1].policy_loss
    assert found.recorded.minibatches[1].policy_loss != found.replayed.minibatches[1].policy_loss


def test_overrides_reach_the_configuration():
    changed = overridden(CONFIG, ["algorithm.clip=0.2", "learner.epochs=3"])
    assert (changed.algorithm.clip_low, changed.algorithm.clip_high) == (0.2, 0.2)
    assert changed.learner.epochs == 3
    assert overridden(CONFIG, ["algorithm.preset=ppo"]).algorithm.preset == "ppo"
    same = overridden(CONFIG, ["learner.epochs=1"])
    assert (same.algorithm, same.learner) == (CONFIG.algorithm, CONFIG.learner)


@pytest.mark.parametrize("assignment", ["seed=3", "rollout.temperature=2", "algorithm.clop=1"])
def test_an_override_that_cannot_change_an_update_is_refused(assignment):
    with pytest.raises(ConfigError):
        overridden(CONFIG, [assignment])


def test_an_update_that_is_not_recorded_says_so(recorded):
    with pytest.raises(RunFileError, match="no finished update 9"):
        replay(recorded, 9)


def test_a_run_file_without_its_starting_policy_says_what_to_take_along(recorded, tmp_path):
    shutil.copy(recorded / "run.sqlite", tmp_path)
    with pytest.raises(CheckpointError, match="lacks the folder model"):
        replay(tmp_path, 0)


def test_replay_needs_no_engine_and_no_sockets(recorded):
    """In a process of its own, where importing vLLM or opening a socket fails."""
    script = f"""
import json, sys
from pathlib import Path

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vllm", "zmq", "uvloop"):
            raise AssertionError(f"replay imported {{name}}")

sys.meta_path.insert(0, Refuse())
sys.addaudithook(
    lambda event, arguments: (_ for _ in ()).throw(AssertionError(event))
    if event in ("socket.bind", "socket.connect") else None
)
from capo.learner.replay import replay
found = replay(Path({str(recorded)!r}), 2)
print(json.dumps([found.started_from, len(found.differences)]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [2, 0]
