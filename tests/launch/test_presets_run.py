"""Every preset by the real command: five updates through a learner, an actor and a vLLM engine.

All share one warm start, which the first of them makes. About a minute each.
"""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from capo.configs.algorithms import (
    needs_critic,
    needs_entropy,
    needs_groups,
    needs_reference,
    needs_state_keys,
    resolve,
)
from capo.configs.load import GROUP_SIZE
from capo.configs.presets import PRESETS
from capo.learner.run_reader import RunReader

ROOT = Path(__file__).parents[2]
UPDATES = 5
EVERYWHERE = {
    *("policy/loss", "policy/kl", "policy/mu", "policy/grad_norm", "policy/entropy"),
    *("ratio/out_of_range", "ratio/active", "ratio/mu", "ratio/log_w_p50", "ratio/clamped_tokens"),
    *("mismatch/k1", "mismatch/k3", "weight/mean", "weight/effective_sample_size"),
    *("staleness/mean", "advantage/std", "batch/return", "batch/outcome", "sync/probe_gap_max"),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_runs_five_updates(preset: str, cache: Path, tmp_path: Path) -> None:
    algorithm = resolve(preset)
    run_dir = tmp_path / "run"
    settings = [
        f"algorithm={preset}",
        f'run_dir="{run_dir}"',
        f"updates={UPDATES}",
        "evaluation.before=false",
        "evaluation.after=false",
    ]
    command = [sys.executable, "-m", "capo.launch.main", "run", "configs/quickstart.toml"]
    done = subprocess.run(
        command + [word for setting in settings for word in ("--set", setting)],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CAPO_CACHE": str(cache)},
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    assert "Traceback" not in output

    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == UPDATES
    for row in rows:
        assert row.keys() >= EVERYWHERE
        assert all(value is not None and math.isfinite(value) for value in row.values())
        assert row["ratio/clamped_tokens"] == row["policy/skipped_steps"] == 0
        assert row["sync/engines"] == 1
        assert ("critic/loss" in row) is needs_critic(algorithm)
        assert ("time/reference_s" in row) is needs_reference(algorithm)
    assert max(row["policy/grad_norm"] for row in rows) > 0

    with RunReader(run_dir) as reader:
        config, updates = reader.config(), reader.updates()
        group_of = {row.episode_id: row.group_id for row in reader.leases()}
        episodes = reader.read_episodes(updates[-1].episode_ids)
    assert config.algorithm == algorithm
    assert [update.status for update in updates] == ["done"] * UPDATES
    size = GROUP_SIZE if needs_groups(algorithm) else 1
    assert config.scheduler.group_size == size
    for update in updates:
        groups = Counter(group_of[episode_id] for episode_id in update.episode_ids)
        assert set(groups.values()) == {size}, "a group was torn apart"
    steps = [step for episode in episodes for step in episode.steps]
    assert all((step.entropies is not None) is needs_entropy(algorithm) for step in steps)
    if needs_state_keys(algorithm):
        assert all(step.state_key for step in steps)
    newest = sorted((run_dir / "checkpoints").glob("version-*"))[-1]
    assert (newest / "policy").is_dir()
    assert (newest / "critic").is_dir() is needs_critic(algorithm)
