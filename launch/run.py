"""`capo run CONFIG`: a learner and its actors on this machine, as separate processes.

They are what `capo learner` and `capo actor` start; this module starts, watches and stops them.
"""

import argparse
import signal
import time
from pathlib import Path

from capo.configs.load import load
from capo.configs.schema import RunConfig
from capo.launch.processes import Child, free_port, stop
from capo.launch.run_directory import choose_run_directory, config_of
from capo.protocol.errors import ConfigError

MAX_ACTOR_RESTARTS = 3
_POLL_S = 0.2


def command(args: argparse.Namespace) -> int:
    if bool(args.config) == bool(args.resume):
        raise ConfigError("give either a CONFIG to start or --resume RUN to go on.")
    if args.resume:
        run_dir = Path(args.resume)
        config = config_of(run_dir)
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
    run_dir: Path, config: RunConfig, learner_arguments: list[str], address: str, num_actors: int
) -> int:
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    signal.signal(signal.SIGTERM, lambda number, _: interrupts.append(number))
    learner = Child("learner", learner_arguments, log=None)
    actors = [
        Child(
            f"actor {index}",
            ["actor", "--connect", address, "--name", f"local-{index}", *_keys(config)],
            log=run_dir / "logs" / f"actor-{index}.log",
        )
        for index in range(num_actors)
    ]
    restarts = dict.fromkeys(range(num_actors), 0)
    forwarded = 0
    try:
        while learner.exit_code() is None:
            time.sleep(_POLL_S)
            if len(interrupts) > forwarded:
                forwarded = len(interrupts)
                if forwarded > 1:
                    print("capo run: stopping at once.", flush=True)
                    break
                learner.signal(signal.SIGINT)
            for index, actor in enumerate(actors):
                code = actor.exit_code()
                if code in (None, 0) or interrupts or restarts[index] > MAX_ACTOR_RESTARTS:
                    continue
                restarts[index] += 1
                if restarts[index] > MAX_ACTOR_RESTARTS:
                    print(
                        f"capo run: {actor.name} ended {restarts[index]} times and is given up; "
                        f"its log is {actor.log}.",
                        flush=True,
                    )
                else:
                    print(
                        f"capo run: {actor.name} ended with exit code {code} and is started "
                        f"again; its log is {actor.log}:\n{actor.last_words()}",
                        flush=True,
                    )
                    actor.restart()
            if num_actors and all(count > MAX_ACTOR_RESTARTS for count in restarts.values()):
                print("capo run: no actor is left; the run stops.", flush=True)
                learner.signal(signal.SIGINT)
                learner.wait(60.0)
                return 1
        code = learner.exit_code()
        if code not in (0, None) and not interrupts:
            print(
                f"capo run: the learner ended with exit code {code}; nothing committed is lost: "
                f"go on with `capo run --resume {run_dir}`.",
                flush=True,
            )
        return 130 if code is None else code
    finally:
        stop([*actors, learner])


def _keys(config: RunConfig) -> list[str]:
    return ["--keys", config.network.key_file] if config.network.key_file else []
