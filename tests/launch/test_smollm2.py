"""A real pretrained model on real games: one full cycle through separate processes.

`make smollm2` brings the model; the games are the compact ALFWorld files beside the checkout.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from capo.learner.metrics_log import read_metrics
from capo.learner.run_reader import RunReader

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "smollm2"
GAMES = ROOT.parent / "shared" / "data" / "alfworld"


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.is_dir(), reason="make smollm2 has not been run")
@pytest.mark.skipif(not GAMES.is_dir(), reason=f"{GAMES} is not here")
def test_games_engine_wire_update_and_broadcast_agree(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "capo.launch.main", "run", "configs/smollm2_alfworld.toml"]
    done = subprocess.run(
        [*command, "--set", f'run_dir="{run_dir}"'],
        cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ALFWORLD_DATA": str(GAMES)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = read_metrics(run_dir)
    assert metrics["sync/engines"] == 1
    gap = metrics["sync/probe_gap_max"]
    assert gap is not None
    assert 0 <= gap < 1e-3
    assert abs(metrics["mismatch/k1/fresh"] or 0.0) < 1e-3
    with RunReader(run_dir) as reader:
        episodes = [row for row in reader.episodes() if row.consumed_by == 0]
        steps = [
            step for row in episodes for step in reader.read_episodes([row.episode_id])[0].steps
        ]
    assert len(episodes) == 4
    assert all(len(step.action) for step in steps)
    assert any(step.keep > 0 for step in steps if step.index > 0)  # rebuilt prompts share a start
