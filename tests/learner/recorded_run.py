"""A run as a learner leaves it: run file, starting policy, checkpoints. Real updates, no engine."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from capo.configs.load import to_json
from capo.configs.schema import RunConfig
from capo.learner import results
from capo.learner.checkpoint import Checkpoints
from capo.learner.episodes import Episode
from capo.learner.run_file import RunFile
from capo.learner.run_leases import GrantedLease
from capo.learner.run_reader import RunReader
from capo.learner.trainer import Trainer
from capo.protocol.messages import Delivery
from capo.protocol.records import Lease, Purpose, Task


def record(
    run_dir: Path, config: RunConfig, model: Path, batches: Sequence[Sequence[Episode]], every: int
) -> None:
    """Play `batches` into a run file, train on what lies in it, save every `every` updates."""
    model.rename(run_dir / "model")
    run_file = RunFile.create(run_dir, {"run_id": "recorded", "config": to_json(config).decode()})
    run_file.actor_seen("ann", "host:1")
    trainer = Trainer(config, run_dir / "model")
    checkpoints = Checkpoints(run_dir, keep_last=9)
    number = 0
    for version, batch in enumerate(batches):
        episode_ids = []
        for played in batch:
            episode_ids.append(deliver(run_file, number, played))
            number += 1
        run_file.begin_update(version, episode_ids)
        with RunReader(run_dir) as reader:
            result = trainer.update(reader.read_episodes(episode_ids), version)
        run_file.finish_update(
            version, seeds={}, metrics=result.metrics, result=results.encode(result)
        )
        if trainer.version % every == 0:
            checkpoints.save(trainer.version, trainer.save)
    run_file.close()


def deliver(run_file: RunFile, number: int, played: Episode, *, actor_id: str = "ann") -> str:
    """As if an actor had played this under lease `number`; the episode's id."""
    lease = Lease(
        lease_id=f"t{number:08d}",
        attempt=1,
        task=Task(played.task_id, b""),
        group_id=f"g{number:08d}",
        member=0,
        purpose=Purpose.TRAIN,
        seed=number,
        policy_version=0,
    )
    run_file.record_leases([GrantedLease(lease, number, actor_id)])
    replace = msgspec.structs.replace
    steps = tuple(replace(step, episode_id=lease.episode_id) for step in played.steps)
    end = replace(played.end, episode_id=lease.episode_id)
    sequence = run_file.last_sequence(actor_id) + 1
    run_file.commit([(actor_id, Delivery(sequence=sequence, steps=steps, ends=(end,)))])
    return lease.episode_id
