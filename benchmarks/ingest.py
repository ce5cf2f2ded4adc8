"""Steps per second that one core writes durably into a run file.

python -m benchmarks.ingest [--folder F] [--steps N] [--prompt-tokens P] [--action-tokens L]

Every commit is synced to the disk of `--folder` before the next one starts, as the learner does
before it acks. Leases are recorded first, so ownership is checked as in a run.
"""

import argparse
import resource
import tempfile
import time
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

STEPS_PER_EPISODE = 10
TASK = Task("task", b"")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=None, help="default: a temporary one")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=64, help="deliveries in one commit")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--action-tokens", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run_file = RunFile.create(Path(folder) / "run", {"run_id": "benchmark"})
        measure(run_file, options)
        run_file.close()


def measure(run_file: RunFile, options: argparse.Namespace) -> None:
    num_episodes = options.steps // STEPS_PER_EPISODE
    run_file.record_leases([GrantedLease(lease(n), n, "actor") for n in range(num_episodes)])
    commits = list[float]()
    num_steps = num_ended = sequence = 0
    started = time.perf_counter()
    processor = time.process_time()
    for first in range(0, num_episodes, options.batch):
        batch = list[tuple[str, Delivery]]()
        for number in range(first, min(first + options.batch, num_episodes)):
            sequence += 1
            batch.append(("actor", delivery(number, sequence, options)))
        before = time.perf_counter()
        committed = run_file.commit(batch)
        commits.append(time.perf_counter() - before)
        num_steps += committed.num_steps
        num_ended += len(committed.ended)
    elapsed = time.perf_counter() - started
    processor = time.process_time() - processor
    assert (num_steps, num_ended) == (num_episodes * STEPS_PER_EPISODE, num_episodes)
    token_bytes = 4 * (options.prompt_tokens + 2 * options.action_tokens) * num_steps
    print(f"steps                {num_steps}")
    print(f"steps/s              {num_steps / elapsed:.0f}")
    print(f"steps/s in commit    {num_steps / sum(commits):.0f}")
    print(f"token MB/s           {token_bytes / sum(commits) / 1e6:.0f}")
    print(f"processor us/step    {processor / num_steps * 1e6:.1f}")
    print(f"commit ms p50 / p99  {np.percentile(commits, 50) * 1e3:.1f} / ", end="")
    print(f"{np.percentile(commits, 99) * 1e3:.1f}")
    print(f"peak memory MiB      {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}")


def lease(number: int) -> Lease:
    return Lease(
        lease_id=f"t{number:08d}",
        attempt=1,
        task=TASK,
        group_id=f"g{number:08d}",
        member=0,
        purpose=Purpose.TRAIN,
        seed=number,
        policy_version=0,
    )


def delivery(number: int, sequence: int, options: argparse.Namespace) -> Delivery:
    """A whole episode; its arrays are shared, since their content does not matter here."""
    episode_id = f"t{number:08d}.1"
    observation = np.arange(options.prompt_tokens, dtype=np.int32)
    action = np.arange(options.action_tokens, dtype=np.int32)
    logprobs = np.full(options.action_tokens, -1.0, dtype=np.float32)
    steps = tuple(
        Step(
            episode_id=episode_id,
            index=index,
            keep=0,
            observation=observation,
            action=action,
            behaviour_logprobs=logprobs,
            versions=(VersionSpan(0, options.action_tokens),),
            reward=0.0,
        )
        for index in range(STEPS_PER_EPISODE)
    )
    end = EpisodeEnd(
        episode_id=episode_id, status=EpisodeStatus.TERMINATED, num_steps=STEPS_PER_EPISODE
    )
    return Delivery(sequence=sequence, steps=steps, ends=(end,))


if __name__ == "__main__":
    main()
