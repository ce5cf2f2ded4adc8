"""`capo actor --connect ADDRESS|RUN`: one rollout node with a vLLM engine. Needs nothing else."""

import argparse
import asyncio
import logging
import math
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

from capo.launch.address import (
    FollowsRun,
    await_address,
    check_address,
    is_run_folder,
    require_keys,
)
from capo.launch.diagnosis import stacks_on_sigquit, tasks_of
from capo.launch.exit_codes import EXIT_INTERRUPTED
from capo.launch.stopping import is_impatient, stop_signals
from capo.protocol.errors import ConfigError
from capo.protocol.keys import ActorKeys, load_actor_keys


def command(args: argparse.Namespace) -> int:
    if args.capacity < 0:
        raise ConfigError(f"--capacity must not be negative, got {args.capacity}.")
    if not args.give_up_after >= 0:
        raise ConfigError(f"--give-up-after must not be negative, got {args.give_up_after:g}.")
    stacks_on_sigquit()
    keys = load_actor_keys(Path(args.keys)) if args.keys else None
    guarded = args.insecure or keys is not None
    patience_s = args.give_up_after or math.inf
    address, run_dir = args.connect, None
    if is_run_folder(address):
        run_dir = Path(address)
        address = await_address(run_dir, patience_s, _say)
    check_address(address)
    require_keys(address, guarded)
    locate = FollowsRun(run_dir, address, guarded=guarded) if run_dir else None
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_work(args, address, keys, patience_s, locate))


async def _work(
    args: argparse.Namespace,
    address: str,
    keys: ActorKeys | None,
    patience_s: float,
    locate: Callable[[], str] | None,
) -> int:
    from capo.actors.vllm_engine import VllmEngine
    from capo.actors.vllm_start import start_engine, transports
    from capo.actors.worker import Worker
    from capo.configs.schema import RolloutConfig
    from capo.protocol.messages import ActorSetup

    with tempfile.TemporaryDirectory(prefix="capo-actor-") as scratch:

        async def start(setup: ActorSetup, rollout: RolloutConfig) -> VllmEngine:
            return await start_engine(setup, rollout, Path(scratch) / "model")

        worker = Worker(start, transports(), name=args.name, capacity=args.capacity, progress=_say)
        loop = asyncio.get_running_loop()
        tasks_of(loop)
        interrupts: list[int] = []

        def interrupt(number: int) -> None:
            if interrupts and not is_impatient(number):
                return
            interrupts.append(number)
            abort = len(interrupts) > 1 or number == signal.SIGTERM
            if not abort:
                _say("finishing the episodes in play; once more drops them")
            worker.drain("the actor was stopped", abort=abort)

        for number in stop_signals():
            loop.add_signal_handler(number, interrupt, number)
        await worker.run(address, keys, patience_s, locate)
    return EXIT_INTERRUPTED if len(interrupts) > 1 else 0


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
