"""The main thread of a learner: take a batch, update, bring the weights to the engines, record.

Owns the order of these and nothing else: what to play is the scheduler's, what an update is the
trainer's, who has which weights the service's. Every wait can be interrupted by `stop` and lets
actors that just came have the current weights.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from capo.configs.schema import EvaluationConfig, RunConfig
from capo.learner import loop_metrics, results
from capo.learner.checkpoint import Checkpoints
from capo.learner.evaluation_round import ModeResult
from capo.learner.lead import Lead
from capo.learner.metrics_log import MetricsLog
from capo.learner.run_file import RunFile
from capo.learner.run_reader import RunReader
from capo.learner.scheduler import Scheduler
from capo.learner.scheduler_status import Batch
from capo.learner.seeds import derive_seed
from capo.learner.service import Service
from capo.learner.trainer import Trainer
from capo.learner.weights import BroadcastReport, WeightBroadcaster
from capo.protocol.errors import StorageFullError
from capo.protocol.records import FloatArray, IntArray, Task

Result = TypeVar("Result")

POLL_S = 0.2
DISK_RETRY_S = 2.0


class Observer(Protocol):
    """Who is told what happens; the launcher shows it to people."""

    def note(self, text: str) -> None: ...

    def waiting(self, text: str) -> None: ...

    def update(self, version: int, metrics: Mapping[str, float]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a loop works with; all of it is open and running."""

    config: RunConfig
    trainer: Trainer | Lead
    scheduler: Scheduler
    service: Service
    broadcaster: WeightBroadcaster
    run_file: RunFile
    reader: RunReader
    checkpoints: Checkpoints
    metrics_log: MetricsLog
    observer: Observer
    stop: threading.Event
    clock: Callable[[], float] = field(default=time.monotonic)


class Stopped(Exception):
    """Somebody asked the run to end; what is in progress was finished."""


class Loop:
    """`train` runs updates until the configured number; `evaluate` plays held-out tasks."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._probe = probe_tokens(parts.config, parts.trainer.vocabulary_size)
        self._probe_logprobs: tuple[int, FloatArray] | None = None
        self._last_update_at = parts.clock()
        self._full = ""  # why nothing can be written at present
        self._recorded = parts.trainer.version  # the update that made it is in the run file

    def train(self, evaluate: Callable[[int], None]) -> None:
        """Run all remaining updates; `evaluate(version)` is called when an evaluation is due.

        Raises Stopped when asked to stop, after a checkpoint of the last finished update.
        """
        parts = self._parts
        total, every = parts.config.updates, parts.config.evaluation.every
        begun_at = parts.trainer.version
        try:
            if every and 0 < begun_at < total and begun_at % every == 0:
                evaluate(begun_at)  # a stop may have interrupted it; a finished one is known
            while parts.trainer.version < total:
                version = parts.trainer.version
                batch = self._wait(
                    lambda: parts.scheduler.take_batch(POLL_S), f"batch of version {version}"
                )
                self._update(batch)
                if parts.trainer.version % parts.config.checkpoint.every == 0:
                    self.checkpoint()
                if every and parts.trainer.version % every == 0 and parts.trainer.version < total:
                    evaluate(parts.trainer.version)
        except Stopped:
            self._checkpoint_at_stop()
            raise
        self._checkpoint_once()

    def evaluate(self, tasks: Sequence[Task], config: EvaluationConfig) -> dict[str, ModeResult]:
        """Success per mode over `tasks` with the current weights; training waits meanwhile."""
        parts = self._parts
        parts.scheduler.start_evaluation(tasks, config.modes)
        parts.service.deal()
        return self._wait(
            lambda: parts.scheduler.wait_evaluation(POLL_S),
            f"{len(tasks) * len(config.modes)} evaluation games",
        )

    def checkpoint(self) -> None:
        """Save everything; a full disk makes the run wait for room, nothing is lost by it."""
        parts = self._parts
        version = parts.trainer.version
        parts.service.doing(f"saves the checkpoint of version {version}")
        trainer = parts.trainer
        saved = self._with_room(
            lambda: parts.checkpoints.save(version, trainer.save, trainer.checkpoint_bytes)
        )
        self._with_room(
            lambda: parts.run_file.record_weights(version, saved.folder.name, saved.digest)
        )

    def _checkpoint_once(self) -> None:
        trained = self._parts.config.updates > 0
        if trained and self._parts.trainer.version not in self._parts.checkpoints.versions():
            self.checkpoint()

    def _checkpoint_at_stop(self) -> None:
        """If it can be done now: a stop does not wait for room on the disk."""
        parts = self._parts
        try:
            if parts.trainer.version == self._recorded:
                self._checkpoint_once()
        except Stopped as stopped:
            parts.observer.note(
                f"There is no checkpoint of version {parts.trainer.version}: {stopped.__cause__} "
                "A resume repeats the updates since the last one."
            )

    def _update(self, batch: Batch) -> None:
        parts, clock = self._parts, self._parts.clock
        parts.service.doing(f"updates from version {batch.version}")
        started = clock()
        result = parts.trainer.update(parts.reader.read_episodes(batch.episode_ids), batch.version)
        updated = clock()
        version = parts.trainer.version
        broadcast = None if batch.again else self._broadcast(parts.service.ready_actors())
        synced = clock()
        metrics = {
            **result.metrics,
            **{f"time/{phase}_s": seconds for phase, seconds in result.phases.items()},
            "time/update_s": updated - started,
            "time/sync_s": synced - updated,
            **loop_metrics.waiting_metrics(
                batch.waited_s,
                synced - self._last_update_at,
                result.metrics["batch/trained_tokens"],
                parts.reader.queue_ages_s(batch.version),
            ),
            **loop_metrics.discard_metrics(batch),
            **loop_metrics.sync_metrics(broadcast),
            **loop_metrics.actor_metrics(parts.service.actors()),
        }
        self._last_update_at = synced
        self._with_room(
            lambda: parts.run_file.finish_update(
                batch.version,
                seeds={"minibatches": derive_seed(parts.config.seed, "minibatches", batch.version)},
                metrics=metrics,
                result=results.encode(result),
            )
        )
        self._recorded = version
        parts.scheduler.version_advanced(version)
        parts.service.announce(version)
        parts.service.deal()
        self._with_room(lambda: parts.metrics_log.write(version, metrics))
        parts.observer.update(version, metrics)

    def _wait(self, step: Callable[[], Result | None], what: str) -> Result:
        parts = self._parts
        while True:
            if parts.stop.is_set():
                raise Stopped
            parts.service.check()
            room = f"waits for room on the disk ({self._full})"
            parts.service.doing(room if self._full else f"waits for the {what}")
            # First, because a resumed run has the batches that it repeats at once: engines, which
            # are ahead of it until then, must not get older weights.
            outcome = self._with_room(step)
            if outcome is not None:
                return outcome
            newcomers = parts.service.ready_actors(without_version=parts.trainer.version)
            if newcomers:
                self._broadcast(newcomers)
                parts.service.deal()
            parts.observer.waiting(self._who_waits(what))

    def _broadcast(self, members: Sequence[str]) -> BroadcastReport:
        parts = self._parts
        version = parts.trainer.version
        parts.service.doing(f"brings version {version} to {len(members)} engine(s)")
        if members and (self._probe_logprobs is None or self._probe_logprobs[0] != version):
            logprobs = parts.trainer.logprobs(self._probe).numpy().astype(np.float32)
            self._probe_logprobs = (version, logprobs)
        expected = self._probe_logprobs[1] if self._probe_logprobs else np.empty(0, np.float32)
        report = parts.broadcaster.broadcast(
            version, parts.trainer.weights(), members, self._probe, expected
        )
        parts.service.weights_arrived(report)
        return report

    def _with_room(self, work: Callable[[], Result]) -> Result:
        """Do `work`; while the disk is full, say so and wait for room. A stop still stops."""
        parts = self._parts
        while True:
            try:
                outcome = work()
            except StorageFullError as error:
                self._tell_full(str(error))
                parts.service.doing(f"waits for room on the disk ({error})")
                if parts.stop.wait(DISK_RETRY_S):
                    raise Stopped from error
                continue
            self._tell_full(parts.service.storage_trouble)
            return outcome

    def _tell_full(self, trouble: str) -> None:
        """Say once that the disk is full, "" that it is not; actors are told by heartbeats."""
        parts = self._parts
        if trouble and not self._full:
            parts.observer.note(f"The run waits for room on the disk: {trouble}")
            parts.service.announce(parts.trainer.version, paused=trouble)
        elif self._full and not trouble:
            parts.observer.note("There is room on the disk again; the run goes on.")
            parts.service.announce(parts.trainer.version)
        self._full = trouble

    def _who_waits(self, what: str) -> str:
        status = self._parts.scheduler.status()
        actors = self._parts.service.actors()
        if not actors:
            return f"learner waits for the {what}: no actor is connected"
        if not any(actor.ready for actor in actors):
            names = ", ".join(actor.name for actor in actors)
            return f"learner waits for the {what}: the engine of {names} starts"
        playing = sum(status.playing.values())
        done = (
            f"{status.evaluation_done} of {status.evaluation_total} games played"
            if status.evaluation_total
            else f"{status.buffered} episodes ready"
        )
        return f"learner waits for the {what}: {done}, {playing} played by {len(actors)} actor(s)"


def probe_tokens(config: RunConfig, vocabulary_size: int) -> IntArray:
    """The sequence whose log-probs prove that an engine has the weights: int32 [n]."""
    length = min(config.weight_sync.probe_tokens, config.model.max_length - 1)
    generator = np.random.default_rng(derive_seed(config.seed, "probe"))
    return generator.integers(0, vocabulary_size, length).astype(np.int32)
