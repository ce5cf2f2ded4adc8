"""A simulated fleet: up to 1,000 actor connections against one learner, and the alternatives.

python -m benchmarks.fleet [--connections N ...] [--seconds S] [--steps-per-delivery N] [--folder F]

For every number of connections a learner process (the real service: leases, validation, run file,
synced commits, acks) takes what a few actor processes send as fast as acks allow. Then the wire
alone, bare pyzmq, JSON over HTTP and pickle over a multiprocessing queue move the same records.
`--seconds 600 --connections 1000` is the ten-minute form. Everything stays on 127.0.0.1.
"""

import argparse
import contextlib
import resource
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from benchmarks._fleet_actors import Told, play
from benchmarks._fleet_learner import Closed, Sample, Storage, learn
from benchmarks._fleet_load import Load
from benchmarks._fleet_others import SPAWN, Rate, bare_pyzmq, json_http, pickle_queue

MIB = 1 << 20
UNACKED_IN_ALL = 1024  # deliveries
CONNECT_LIMIT_S = 120.0
SETTLE_LIMIT_S = 180.0
WARM_UP_S = 2.0


class Stage(Struct, frozen=True, kw_only=True):
    """One number of connections: the learner's samples, and what both sides said at the end."""

    connections: int
    samples: list[Sample]
    closed: Closed
    told: list[Told]

    @property
    def num_steps(self) -> int:
        return self.samples[-1].num_steps - self.samples[0].num_steps

    @property
    def rate(self) -> Rate:
        first, last = self.samples[0], self.samples[-1]
        return Rate(
            self.num_steps / (last.wall_s - first.wall_s),
            (last.processor_s - first.processor_s) / self.num_steps * 1e6,
        )

    @property
    def lost_steps(self) -> int:
        """Acked but not stored; negative if more was stored than was sent."""
        return sum(told.acked_steps + told.unacked_steps for told in self.told) - (
            self.closed.stored_steps
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=5.0, help="for every measurement")
    parser.add_argument("--actor-processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None, help="for run files; default: /tmp")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--kept-tokens", type=int, default=1000)
    parser.add_argument("--action-tokens", type=int, default=100)
    parser.add_argument("--steps-per-delivery", type=int, default=16)
    parser.add_argument("--no-others", action="store_true", help="leave out the alternatives")
    options = parser.parse_args()
    load = Load(
        prompt_tokens=options.prompt_tokens,
        kept_tokens=options.kept_tokens,
        action_tokens=options.action_tokens,
        steps_per_delivery=options.steps_per_delivery,
    )
    allow_files(max(options.connections))
    print(
        f"prompts of {load.prompt_tokens} tokens, {load.kept_tokens} of them kept from before, "
        f"actions of {load.action_tokens}: {load.bytes_per_step() / 1000:.1f} kB a step; "
        f"{load.steps_per_delivery} steps a delivery; {options.seconds:g} s each"
    )
    print(f"{'connections':>11} {'steps/s':>8} {'cpu us/step':>11} {'cores':>5} "
          f"{'MiB start/middle/end/peak':>26} {'ack ms p50/p99':>14} {'lost':>5}")  # fmt: skip
    for connections in options.connections:
        print(line(run(connections, "run file", load, options)), flush=True)
    if not options.no_others:
        compare(load, options)


def run(connections: int, storage: Storage, load: Load, options: argparse.Namespace) -> Stage:
    """One learner and its fleet, from start to end."""
    capacity = max(load.steps_per_delivery, min(256, 4096 // connections))
    max_unacked = max(2, min(64, UNACKED_IN_ALL // connections))
    with (
        tempfile.TemporaryDirectory(prefix="fleet-", dir=options.folder) as folder,
        process(learn, Path(folder) / "run", storage, capacity) as learner,
    ):
        address = receive(learner, CONNECT_LIMIT_S, "the learner's address")
        names = [f"actor-{number}" for number in range(connections)]
        num_processes = min(options.actor_processes, connections)
        limit_s = options.seconds + CONNECT_LIMIT_S + SETTLE_LIMIT_S
        with contextlib.ExitStack() as stack:
            fleet = [
                stack.enter_context(
                    process(
                        play,
                        address,
                        names[n::num_processes],
                        load,
                        capacity,
                        max_unacked,
                        limit_s,
                    )
                )
                for n in range(num_processes)
            ]
            samples = measure(learner, connections, options.seconds)
            for one in fleet:
                one.send("stop")
            told = [receive(one, SETTLE_LIMIT_S, "the actors' counts") for one in fleet]
        learner.send("close")
        closed = receive(learner, SETTLE_LIMIT_S, "the end of the learner")
    return Stage(connections=connections, samples=samples, closed=closed, told=told)


def measure(learner: Connection, connections: int, seconds: float) -> list[Sample]:
    """A sample every second (or tenth of the time), once all actors are there and warm."""

    def sample() -> Sample:
        learner.send("sample")
        taken: Sample = receive(learner, 60.0, "a sample")
        return taken

    deadline = time.monotonic() + CONNECT_LIMIT_S
    while (now := sample()).num_actors < connections or not now.num_steps:
        if time.monotonic() > deadline:
            raise SystemExit(f"{now.num_actors} of {connections} actors came in time")
        time.sleep(0.1)
    time.sleep(WARM_UP_S)
    samples = [sample()]
    while samples[-1].wall_s - samples[0].wall_s < seconds:
        time.sleep(min(1.0, seconds / 10))
        samples.append(sample())
    return samples


def line(stage: Stage) -> str:
    rate = stage.rate
    resident = [sample.resident_bytes / MIB for sample in stage.samples]
    memory = (resident[0], resident[len(resident) // 2], resident[-1], max(resident))
    ack_ms = np.concatenate([np.array(told.ack_s) for told in stage.told]) * 1e3
    text = (
        f"{stage.connections:>11} {rate.steps_per_s:>8,.0f} {rate.processor_us:>11.1f} "
        f"{rate.steps_per_s * rate.processor_us / 1e6:>5.2f} "
        f"{'/'.join(f'{one:.0f}' for one in memory):>26} "
        f"{'/'.join(f'{one:.0f}' for one in np.percentile(ack_ms, [50, 99])):>14} "
        f"{stage.lost_steps:>5}"
    )
    stats = stage.closed.stats
    for name in ("duplicates", "gaps", "over_window", "over_memory", "malformed", "refused"):
        if getattr(stats, name):
            text += f"\n{'':>11} {name}: {getattr(stats, name)}"
    if stage.closed.excluded_episodes:
        text += f"\n{'':>11} excluded episodes: {stage.closed.excluded_episodes}"
    for fault in {told.fault for told in stage.told if told.fault}:
        text += f"\n{'':>11} an actor says: {fault}"
    return text


def compare(load: Load, options: argparse.Namespace) -> None:
    """The wire alone over one connection, and what else could move the records."""
    options = argparse.Namespace(**vars(options) | {"actor_processes": 1})
    rates = {"capo's wire": run(1, "nothing", load, options).rate}
    for name, measured in (
        ("bare pyzmq", bare_pyzmq),
        ("JSON over HTTP", json_http),
        ("pickle, mp.Queue", pickle_queue),
    ):
        try:
            rates[name] = measured(load, options.seconds)
        except ImportError:
            print(f"{name} was left out: it needs `pip install aiohttp`")
    own = rates["capo's wire"]
    print(f"\n{'one connection':>17} {'steps/s':>8} {'MB/s':>6} {'cpu us/step':>11} "
          f"{'capo / it: steps/s':>18} {'steps per cpu second':>20}")  # fmt: skip
    for name, rate in rates.items():
        print(
            f"{name:>17} {rate.steps_per_s:>8,.0f} "
            f"{rate.steps_per_s * load.bytes_per_step() / 1e6:>6,.0f} {rate.processor_us:>11.1f} "
            f"{own.steps_per_s / rate.steps_per_s:>18.2f} "
            f"{rate.processor_us / own.processor_us:>20.2f}"
        )


def allow_files(connections: int) -> None:
    """Two descriptors for every connection on either side; refuses what this machine forbids."""
    needed = 2 * connections + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SystemExit(
            f"{connections} connections need {needed} open files a process, and {hard} are "
            "allowed: raise the limit (ulimit -Hn), or ask for fewer --connections"
        )
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextlib.contextmanager
def process(body: Any, *arguments: Any) -> Iterator[Connection]:
    """A child process that is spoken with over the connection; it does not outlive the block."""
    own, its = SPAWN.Pipe()
    child = SPAWN.Process(target=body, args=(its, *arguments), daemon=True)
    child.start()
    its.close()
    try:
        yield own
        child.join(30)
    finally:
        if child.is_alive():
            child.kill()
        child.join()
        own.close()


def receive(connection: Connection, limit_s: float, what: str) -> Any:
    if not connection.poll(limit_s):
        raise SystemExit(f"waited {limit_s:.0f} s in vain for {what}")
    try:
        return connection.recv()
    except EOFError:
        raise SystemExit(f"a process ended before it sent {what}") from None


if __name__ == "__main__":
    main()
