"""Deliveries, leases and run files as the tests of the run file and the scheduler need them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from capo.learner.run_file import RunFile
from capo.learner.run_leases import GrantedLease
from capo.protocol.messages import Delivery
from capo.protocol.records import (
    EpisodeEnd,
    EpisodeStatus,
    Lease,
    Purpose,
    Step,
    Task,
    VersionSpan,
)


def task(number: int) -> Task:
    return Task(f"game-{number}", f"payload of {number}".encode())


def lease(number: int, attempt: int = 1) -> Lease:
    return Lease(
        lease_id=f"t{number:08d}",
        attempt=attempt,
        task=task(number),
        group_id=f"g{number:08d}",
        member=0,
        purpose=Purpose.TRAIN,
        seed=number,
        policy_version=0,
    )


def lend(run_file: RunFile, actor_id: str, *numbers: int, attempt: int = 1) -> None:
    run_file.record_leases(
        [GrantedLease(lease(number, attempt), number, actor_id) for number in numbers]
    )


def step(episode_id: str, index: int = 0, *, version: int = 0, size: int = 3, reward: float = 0.0):
    rng = np.random.default_rng([index, size])
    return Step(
        episode_id=episode_id,
        index=index,
        keep=0 if index == 0 else 2,
        observation=rng.integers(0, 50, size + 1, dtype=np.int32),
        action=rng.integers(0, 50, size, dtype=np.int32),
        behaviour_logprobs=-rng.random(size, dtype=np.float32),
        versions=(VersionSpan(version, size),),
        reward=reward,
        state_key=f"state {index}",
        info={"valid": 1.0},
    )


def end(
    episode_id: str,
    num_steps: int,
    status: EpisodeStatus = EpisodeStatus.TERMINATED,
    *,
    outcome: float = 1.0,
    error: str = "",
) -> EpisodeEnd:
    truncated = status is EpisodeStatus.TRUNCATED
    return EpisodeEnd(
        episode_id=episode_id,
        status=status,
        num_steps=num_steps,
        outcome=outcome,
        final_keep=4 if truncated else 0,
        final_observation=np.arange(3, dtype=np.int32) if truncated else None,
        metrics={"turns": float(num_steps)},
        error=error,
    )


def episode(
    sequence: int,
    episode_id: str,
    num_steps: int = 2,
    status: EpisodeStatus = EpisodeStatus.TERMINATED,
    *,
    version: int = 0,
    outcome: float = 1.0,
    reward: float = 1.0,
) -> Delivery:
    """A whole episode in one delivery; its reward comes at the end."""
    steps = tuple(
        step(episode_id, index, version=version, reward=reward * (index == num_steps - 1))
        for index in range(num_steps)
    )
    return Delivery(
        sequence=sequence,
        steps=steps,
        ends=(end(episode_id, num_steps, status, outcome=outcome),),
    )


def new_run(folder: Path, **facts: str) -> RunFile:
    return RunFile.create(folder, {"run_id": "test", **facts})


def stored_steps(run_dir: Path, episode_ids: Sequence[str] = ()) -> list[tuple[str, int]]:
    """(episode_id, index) of every stored step, by plain SQL."""
    import sqlite3

    connection = sqlite3.connect(f"file:{run_dir / 'run.sqlite'}?mode=ro", uri=True)
    rows = connection.execute("SELECT episode_id, step_index FROM steps ORDER BY 1, 2").fetchall()
    connection.close()
    return [row for row in rows if not episode_ids or row[0] in episode_ids]
