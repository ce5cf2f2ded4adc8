"""`capo learner CONFIG`: one learner. Assembles the parts, runs the loop, prints the outcome."""

import argparse
import contextlib
import os
import platform
import signal
import threading
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from capo.configs.algorithm_text import changes_without_effect
from capo.configs.load import load, to_json
from capo.configs.schema import RunConfig
from capo.envs.api import EnvFactory
from capo.envs.registry import load_factory
from capo.launch import libraries
from capo.launch.diagnosis import stacks_on_sigquit
from capo.launch.exit_codes import EXIT_FAILURE, EXIT_INTERRUPTED
from capo.launch.open_files import allow_many_open_files
from capo.launch.progress import Progress
from capo.launch.rank import rank_of_environment, serve
from capo.launch.resumed import resumed_config
from capo.launch.run_directory import choose_run_directory, discard_run, require_unused
from capo.launch.stopping import is_impatient, stop_signals
from capo.protocol.errors import CapoError, ConfigError, PeerLostError, RankLostError
from capo.protocol.records import Task

if TYPE_CHECKING:
    from capo.learner.loop import Parts
    from capo.learner.run_reader import RunReader
    from capo.learner.service import Service

DRAIN_TIMEOUT_S = 30.0


def command(args: argparse.Namespace) -> int:
    if rank_of_environment() > 0:  # a launcher started all ranks alike; rank 0 knows the rest
        return serve()
    if bool(args.config) == bool(args.resume):
        raise ConfigError("give either a CONFIG to start or --resume RUN to go on.")
    if args.resume:
        run_dir = Path(args.resume)
        config = resumed_config(run_dir, args.overrides)
    else:
        config = load(args.config, args.overrides)
        run_dir = choose_run_directory(config)
    stop, keep_actors = threading.Event(), threading.Event()
    stacks_on_sigquit()
    allow_many_open_files()
    with _signals(stop, keep_actors):
        return _run(config, run_dir, bool(args.resume), stop, keep_actors)


def _run(
    config: RunConfig,
    run_dir: Path,
    resume: bool,
    stop: threading.Event,
    keep_actors: threading.Event,
) -> int:
    libraries.prepare()
    from capo.launch.assemble import assemble
    from capo.launch.rank_processes import all_ranks
    from capo.learner.loop import Stopped
    from capo.learner.run_file import RunFile

    factory = load_factory(config.environment.factory, config.environment.options)
    held_out = _held_out(config, factory)
    if not resume:
        require_unused(run_dir)
    progress = Progress(Console(), config.updates)
    if silent := changes_without_effect(config.algorithm):
        progress.note(f"Without effect under this algorithm: {', '.join(silent)} (see capo check).")
    with contextlib.ExitStack() as stack:
        stack.callback(progress.close)
        rank_lost = partial(_end_without, progress, run_dir)
        crew = stack.enter_context(all_ranks(config.learner.ranks, run_dir / "logs", rank_lost))
        run_file = RunFile.open(run_dir) if resume else RunFile.create(run_dir, _facts(config))
        stack.callback(run_file.close)
        try:
            parts = assemble(config, run_dir, factory, run_file, crew, progress, stop, stack)
        except BaseException:
            if not resume:  # nothing has begun: leave the folder free for a corrected start
                stack.close()
                discard_run(run_dir)
            raise
        try:
            _train(parts, held_out, progress)
        except Stopped:
            command = "run"
            if keep_actors.is_set():
                progress.note("Actors wait with their engines for the run to go on.")
                command = "learner"
            else:
                _send_home(parts.service, "the run was stopped", progress, abort=True)
            progress.note(
                f"Stopped after update {parts.trainer.version} of {config.updates}; go on with: "
                f"capo {command} --resume {run_dir}"
            )
            return EXIT_INTERRUPTED
        except RankLostError:
            raise
        except CapoError as error:  # it cannot go on: no actor should wait for its return
            _send_home(parts.service, f"the run ended: {error}", progress, abort=True)
            raise
        _send_home(parts.service, "the run is complete", progress, abort=False)
        _show_outcome(parts.reader, run_dir, progress)
    return 0


def _train(parts: "Parts", held_out: Sequence[Task], progress: Progress) -> None:
    """All remaining updates, with the evaluations that the configuration asks for."""
    from capo.launch.outcome import evaluation_line
    from capo.learner.loop import Loop

    loop, evaluation = Loop(parts), parts.config.evaluation

    def evaluate(at: int) -> None:
        progress.note(evaluation_line(at, loop.evaluate(held_out, evaluation)))

    if held_out and evaluation.before and parts.trainer.version == 0:
        evaluate(0)
    loop.train(evaluate if held_out else lambda at: None)
    if held_out and evaluation.after:
        evaluate(parts.trainer.version)


def _end_without(progress: Progress, run_dir: Path, sentence: str) -> None:
    """A learner that lost a rank ends like one that was killed, so its actors wait for its return.

    `sentence` says which.
    """
    for line in sentence.splitlines():
        progress.note(line)
    progress.note(
        "The learner ends with it; nothing committed is lost: go on with capo learner --resume "
        f"{run_dir}"
    )
    os._exit(EXIT_FAILURE)


def _show_outcome(reader: "RunReader", run_dir: Path, progress: Progress) -> None:
    from capo.launch.outcome import OUTCOME_COLUMNS, evaluations_of, outcome_rows

    progress.close()
    if rows := outcome_rows(evaluations_of(reader)):
        progress.table("Held-out games", OUTCOME_COLUMNS, rows)
    progress.note(f"The run is in {run_dir}; look at it with: capo report {run_dir}")


def _held_out(config: RunConfig, factory: EnvFactory) -> Sequence[Task]:
    evaluation = config.evaluation
    wanted = evaluation.before or evaluation.after or evaluation.every
    if not wanted or not evaluation.games:
        return []
    tasks = factory.tasks(evaluation.split)
    if len(tasks) < evaluation.games:
        raise ConfigError(
            f"evaluation.games asks for {evaluation.games} games, but split {evaluation.split!r} "
            f"has {len(tasks)}."
        )
    return tasks[: evaluation.games]


def _facts(config: RunConfig) -> dict[str, str]:
    return {
        "run_id": uuid.uuid4().hex,
        "config": to_json(config).decode(),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        **{f"version.{name}": _version(name) for name in ("capo-rl", "torch", "transformers")},
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _send_home(service: "Service", reason: str, progress: Progress, *, abort: bool) -> None:
    # On a full disk nothing is acked any more, so nobody could leave in order.
    timeout_s = 1.0 if service.storage_trouble else DRAIN_TIMEOUT_S
    try:
        service.drain(reason, timeout_s, abort=abort)
    except PeerLostError as error:
        progress.note(f"Not waiting any longer: {error}")


@contextlib.contextmanager
def _signals(stop: threading.Event, keep_actors: threading.Event) -> Iterator[None]:
    """First signal: finish what is in progress. Second: at once. SIGUSR1 is a first one that leaves
    the actors where they are, for a learner that comes back soon, as under a cluster's scheduler.
    """

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            if is_impatient(number):
                raise KeyboardInterrupt
            return
        print("Stopping after the update in progress; once more stops at once.", flush=True)
        if number == signal.SIGUSR1:
            keep_actors.set()
        stop.set()

    numbers = (*stop_signals(), signal.SIGUSR1)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
