"""From a configuration and an open run file to a learner whose parts run: `Parts` of its loop."""

import contextlib
import platform
import threading
from pathlib import Path

import torch

from capo.configs.load import to_json
from capo.configs.schema import RunConfig, WeightSyncConfig
from capo.envs.api import EnvFactory
from capo.launch.actor_setup import actor_setup
from capo.launch.address import reachable
from capo.launch.diagnosis import tasks_of
from capo.launch.model_source import ModelSource
from capo.launch.progress import Progress
from capo.launch.rank_processes import Crew
from capo.launch.run_directory import write_address
from capo.learner.checkpoint import Checkpoints
from capo.learner.lead import open_trainer
from capo.learner.loop import Parts
from capo.learner.metrics_log import MetricsLog
from capo.learner.run_file import RunFile
from capo.learner.run_reader import CONFIG_SINCE, RunReader
from capo.learner.scheduler import Scheduler
from capo.learner.scheduler_rules import SchedulerRules
from capo.learner.service import Service
from capo.learner.weight_transfer import WeightTransport
from capo.learner.weights import WeightBroadcaster, WeightLimits
from capo.protocol.frames import MIB

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}  # nats; see docs/architecture.md, "A broadcast"


def assemble(
    config: RunConfig,
    run_dir: Path,
    factory: EnvFactory,
    run_file: RunFile,
    crew: Crew,
    progress: Progress,
    stop: threading.Event,
    stack: contextlib.ExitStack,
) -> Parts:
    """Serve actors as early as possible, so that engines start while the policy is prepared.

    Everything that has to be closed goes onto `stack`.
    """
    reader = stack.enter_context(RunReader(run_dir))
    checkpoints = Checkpoints(run_dir, config.checkpoint.keep_last)
    begun = checkpoints.latest()
    version = begun.version if begun else 0
    past = reader.history(version)
    if config != reader.config():
        run_file.set_facts({f"{CONFIG_SINCE}{version}": to_json(config).decode()})
    rules, tasks = SchedulerRules.from_config(config), factory.tasks("train")
    scheduler = Scheduler.open(rules, tasks, run_file, version)
    for sentence in begun.refused if begun else ():
        progress.note(sentence)
    source = ModelSource(config, factory, run_dir / "model")
    service = Service(
        run_id=reader.facts()["run_id"],
        name=f"{config.name} on {platform.node()}",
        run_dir=run_dir,
        setup=actor_setup(config, source.description()),
        network=config.network,
        run_file=run_file,
        scheduler=scheduler,
        note=progress.note,
    )
    _listen(service, run_dir, progress, stack)
    orders = crew.lead()  # before the policy is prepared: the others may not wait for it long
    trainer = open_trainer(config, source.weights(progress.note), orders)
    if begun:
        trainer.load(begun.folder)
        progress.note(f"Going on from the checkpoint of version {begun.version}.")
    broadcaster = _attach_broadcaster(config, service, stack)
    service.announce(trainer.version)
    metrics_log = stack.enter_context(MetricsLog(run_dir, past))
    return Parts(
        config=config,
        trainer=trainer,
        scheduler=scheduler,
        service=service,
        broadcaster=broadcaster,
        run_file=run_file,
        reader=reader,
        checkpoints=checkpoints,
        metrics_log=metrics_log,
        observer=progress,
        stop=stop,
    )


def _listen(
    service: Service, run_dir: Path, progress: Progress, stack: contextlib.ExitStack
) -> None:
    address = reachable(service.start())
    stack.callback(service.close)
    tasks_of(service.loop)
    write_address(run_dir, address)
    progress.note(f"Run {run_dir} listens; attach with: capo actor --connect {address}")


def _attach_broadcaster(
    config: RunConfig, service: Service, stack: contextlib.ExitStack
) -> WeightBroadcaster:
    broadcaster = WeightBroadcaster(
        service.send,
        open_transport(config.weight_sync, config.network.weights_host),
        weight_limits(config),
    )
    stack.callback(broadcaster.close)
    service.attach(broadcaster)
    return broadcaster


def weight_limits(config: RunConfig) -> WeightLimits:
    sync = config.weight_sync
    return WeightLimits(
        bucket_bytes=sync.bucket_mib * MIB,
        join_timeout_s=sync.join_timeout_s,
        transfer_timeout_s=sync.transfer_timeout_s,
        probe_tolerance=sync.probe_tolerance or TOLERANCE[config.model.dtype],
    )


def open_transport(sync: WeightSyncConfig, host: str) -> WeightTransport:
    """NCCL where there are GPUs, gloo elsewhere, or what the configuration says."""
    name = sync.transport
    if name == "auto":
        name = "nccl" if torch.cuda.is_available() else "gloo"
    if name == "nccl":
        from capo.learner.weight_transfer_nccl import NcclTransport

        return NcclTransport(host, torch.device("cuda"))
    from capo.learner.weight_transfer_gloo import GlooTransport

    return GlooTransport(host)
