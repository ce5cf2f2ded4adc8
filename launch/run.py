"""`capo run CONFIG`: a learner and its actors on this machine, as separate processes.

They are what `capo learner` and `capo actor` start; this module starts, watches and stops them.
"""

import argparse
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from capo.configs.load import load
from capo.configs.schema import RunConfig
from capo.launch.diagnosis import on_sigquit
from capo.launch.exit_codes import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_INTERRUPTED
from capo.launch.processes import Child, free_port, stop
from capo.launch.resumed import resumed_config
from capo.launch.run_directory import DATABASE, choose_run_directory
from capo.launch.stopping import is_impatient, stop_signals
from capo.learner import run_database
from capo.protocol.errors import ConfigError

MAX_ACTOR_RESTARTS = 3  # within
RESTART_WINDOW_S = 600.0
_POLL_S = 0.2


def command(args: argparse.Namespace) -> int:
    if bool(args.config) == bool(args.resume):
        raise ConfigError("give either a CONFIG to start or --resume RUN to go on.")
    if args.resume:
        run_dir = Path(args.resume)
        config = resumed_config(run_dir, args.overrides)
        # Before actors are started: they would find the learner that is at work there, and join.
        os.close(run_database.lock(run_dir / DATABASE))
        learner_arguments = ["learner", "--resume", str(run_dir)]
    else:
        config = load(args.config, args.overrides)
        run_dir = choose_run_directory(config)
        learner_arguments = ["learner", args.config, "--set", f'run_dir="{run_dir}"']
    for override in args.overrides:
        learner_arguments += ["--set", override]
    bind = config.network.bind
    if bind.endswith(":0"):
        bind = f"{bind.removesuffix(':0')}:{free_port()}"
        learner_arguments += ["--set", f'network.bind="{bind}"']
    num_actors = config.actors if args.actors is None else args.actors
    return supervise(run_dir, config, learner_arguments, bind, num_actors)


def supervise(
    run_dir: Path,
    config: RunConfig,
    learner_arguments: list[str],
    address: str,
    num_actors: int,
    learner_log: Path | None = None,
) -> int:
    """Run a learner and its actors to the end of the learner; returns its exit code."""
    interrupts: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        if not interrupts or is_impatient(number):
            interrupts.append(number)

    for number in stop_signals():
        signal.signal(number, interrupt)
    actor_arguments = [
        ["actor", "--connect", address, "--name", f"local-{index}", *_keys(config, index)]
        for index in range(num_actors)
    ]
    children: list[Child] = []
    on_sigquit(lambda: _ask_for_stacks(children))
    learner = Child("learner", learner_arguments, log=learner_log)
    actors = [
        Child(f"actor {index}", arguments, log=run_dir / "logs" / f"actor-{index}.log")
        for index, arguments in enumerate(actor_arguments)
    ]
    children += [learner, *actors]
    try:
        return _watch(learner, actors, run_dir, interrupts)
    finally:
        stop([*actors, learner])


def _watch(learner: Child, actors: Sequence[Child], run_dir: Path, interrupts: list[int]) -> int:
    restarts: dict[str, list[float]] = {actor.name: [] for actor in actors}
    forwarded = 0
    while (code := learner.exit_code()) is None:
        time.sleep(_POLL_S)
        if len(interrupts) > forwarded:
            forwarded = len(interrupts)
            if forwarded > 1:
                _say("stopping at once.")
                return EXIT_INTERRUPTED
            learner.signal(signal.SIGINT)
        if interrupts:
            continue
        given_up = [not _keep_alive(actor, restarts[actor.name]) for actor in actors]
        if actors and all(given_up):
            logs = ", ".join(str(actor.log) for actor in actors)
            _say(f"every actor keeps failing, so the run stops; see {logs}.")
            learner.signal(signal.SIGINT)
            learner.wait(60.0)
            return EXIT_FAILURE
    if code not in (0, EXIT_BAD_INPUT) and not interrupts and (run_dir / DATABASE).exists():
        _say(
            f"the learner ended with exit code {code}; nothing committed is lost: go on with "
            f"capo run --resume {run_dir}"
        )
    return code


def _ask_for_stacks(children: Sequence[Child]) -> None:
    """They are in sessions of their own, so the terminal's Ctrl-\\ reaches us alone."""
    for child in children:
        where = f" to {child.log}" if child.log else " here"
        _say(f"the {child.name} (pid {child.pid}) writes its stacks{where}.")
        child.signal(signal.SIGQUIT)


def _keep_alive(actor: Child, restarts: list[float]) -> bool:
    """Start an actor that failed again; False once it failed too often in too short a time."""
    code = actor.exit_code()
    if code in (None, 0):
        return True
    now = time.monotonic()
    recent = [moment for moment in restarts if now - moment < RESTART_WINDOW_S]
    if len(recent) >= MAX_ACTOR_RESTARTS:
        return False
    restarts.append(now)
    _say(
        f"{actor.name} ended with exit code {code} and is started again; its log is {actor.log}:\n"
        f"{actor.last_words()}"
    )
    actor.restart()
    return True


def _say(text: str) -> None:
    print(f"capo run: {text}", flush=True)


def _keys(config: RunConfig, index: int) -> list[str]:
    """The key file that `capo keygen` wrote for this actor, beside the learner's."""
    if not config.network.key_file:
        return []
    file = Path(config.network.key_file).with_name(f"actor-{index}.key")
    if not file.is_file():
        raise ConfigError(
            f"network.key_file is set, but there is no {file} for local actor {index}; make the "
            f"keys with: capo keygen {file.parent} --actors {index + 1}"
        )
    return ["--keys", str(file)]
