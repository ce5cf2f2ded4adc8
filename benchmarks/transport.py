"""Our wire against bare pyzmq: the same bytes in the same frames, in turns within one run.

An actor process sends, this one receives. "ours" is everything: records made into deliveries, the
window, decoding, validation, commit (into nothing) and acks. "bare" is a DEALER that sends frames
made beforehand and a ROUTER that throws them away. Rates are of the wall clock and of the receiving
process's own time on the processor, from the first message to the last.

python -m benchmarks.transport [--steps N] [--prompt-tokens P] [--action-tokens L] [--rounds R]
"""

import argparse
import asyncio
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import uvloop
import zmq

from capo.protocol.client import ActorClient
from capo.protocol.frames import encode, size_of
from capo.protocol.messages import PROTOCOL_VERSION, Delivery, Hello, ToLearner, Welcome
from capo.protocol.records import Step, VersionSpan
from capo.protocol.server import Server

STEPS_PER_DELIVERY = 64  # as many episodes are played at once
WINDOW = 64
LIMIT_S = 120.0


class Load(NamedTuple):
    num_deliveries: int
    prompt_tokens: int
    action_tokens: int

    @property
    def num_steps(self) -> int:
        return self.num_deliveries * STEPS_PER_DELIVERY


class Spent(NamedTuple):
    wall_s: float
    processor_s: float


class Counter:
    """A handler that counts steps and keeps nothing; `started` and `ended` are read clocks."""

    def __init__(self, num_steps: int) -> None:
        self.missing = num_steps
        self.started: Spent | None = None
        self.ended = Spent(0.0, 0.0)
        self.done = threading.Event()

    def hello(self, hello: Hello) -> Welcome:
        return Welcome(
            run_id="benchmark",
            learner_name="benchmark",
            last_sequence=0,
            window=WINDOW,
            heartbeat_s=1.0,
            dead_after_s=15.0,
            setup=None,
        )

    def commit(self, deliveries: Sequence[tuple[str, Delivery]]) -> None:
        self.started = self.started or clocks()
        self.missing -= sum(len(delivery.steps) for _, delivery in deliveries)
        if self.missing <= 0:
            self.ended = clocks()
            self.done.set()

    def control(self, actor_id: str, message: ToLearner) -> None:
        pass

    def lost(self, actor_id: str, reason: str) -> None:
        pass

    def report(self) -> bytes:
        return b"{}"

    def tick(self) -> None:
        pass


def clocks() -> Spent:
    return Spent(time.perf_counter(), time.process_time())


def between(started: Spent, ended: Spent) -> Spent:
    return Spent(ended.wall_s - started.wall_s, ended.processor_s - started.processor_s)


def make_steps(load: Load) -> list[Step]:
    random = np.random.default_rng(0)
    return [
        Step(
            episode_id=f"lease-{number}.0",
            index=1,
            keep=0,
            observation=random.integers(0, 150_000, load.prompt_tokens, np.int32),
            action=random.integers(0, 150_000, load.action_tokens, np.int32),
            behaviour_logprobs=-random.random(load.action_tokens, np.float32),
            versions=(VersionSpan(0, load.action_tokens),),
            reward=0.0,
        )
        for number in range(STEPS_PER_DELIVERY)
    ]


def make_frames(load: Load) -> list[bytes | memoryview]:
    return encode(Delivery(sequence=1, steps=tuple(make_steps(load))))


def send_ours(address: str, load: Load) -> None:
    async def play(client: ActorClient, step: Step) -> None:
        for _ in range(load.num_deliveries):
            await client.deliver([step])

    async def main() -> None:
        hello = Hello(protocol_version=PROTOCOL_VERSION, actor_id="actor", actor_name="actor")
        async with ActorClient(address, lambda: hello) as client:
            async with asyncio.TaskGroup() as tasks:
                for step in make_steps(load):
                    tasks.create_task(play(client, step))
            await client.flush(LIMIT_S)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def send_bare(address: str, load: Load) -> None:
    frames = make_frames(load)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        for _ in range(load.num_deliveries):
            socket.send_multipart(frames, copy=False)
        socket.recv()  # everything has arrived


def receive_ours(load: Load) -> Spent:
    counter = Counter(load.num_steps)
    server = Server("tcp://127.0.0.1:0", counter)
    process = start(send_ours, server.start(), load)
    if not counter.done.wait(LIMIT_S) or counter.started is None:
        raise SystemExit(f"the sending process did not deliver everything within {LIMIT_S:.0f} s")
    process.join(LIMIT_S)
    server.close()
    return between(counter.started, counter.ended)


def receive_bare(load: Load) -> Spent:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, int(LIMIT_S * 1000))
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        process = start(send_bare, f"tcp://127.0.0.1:{port}", load)
        parts = socket.recv_multipart()
        started = clocks()
        for _ in range(load.num_deliveries - 1):
            parts = socket.recv_multipart()
        ended = clocks()
        socket.send_multipart([parts[0], b"done"])
        process.join(LIMIT_S)
    return between(started, ended)


def start(
    send: Callable[[str, Load], None], address: str, load: Load
) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=send, args=(address, load))
    process.start()
    return process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=64_000, help="per round and kind")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--action-tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    load = Load(options.steps // STEPS_PER_DELIVERY, options.prompt_tokens, options.action_tokens)
    num_bytes = size_of(make_frames(load)) * load.num_deliveries
    print(
        f"{load.num_steps:,} steps of {load.prompt_tokens} + {load.action_tokens} tokens, "
        f"{num_bytes / 1e6:,.0f} MB a round, {len(make_frames(load))} frames a message"
    )
    rounds = [(receive_ours(load), receive_bare(load)) for _ in range(options.rounds)]
    for name, spent in zip(("ours", "bare"), zip(*rounds, strict=True), strict=True):
        wall_s = statistics.median(one.wall_s for one in spent)
        processor_s = statistics.median(one.processor_s for one in spent)
        print(
            f"{name}: {num_bytes / wall_s / 1e6:7,.0f} MB/s {load.num_steps / wall_s:9,.0f} steps/s"
            f" {load.num_steps / processor_s:9,.0f} steps per second of the receiver's processor"
        )
    wall = statistics.median(bare.wall_s / ours.wall_s for ours, bare in rounds)
    processor = statistics.median(bare.processor_s / ours.processor_s for ours, bare in rounds)
    print(f"ours / bare: {wall:.2f} of the wall clock's rate, {processor:.2f} of the processor's")


if __name__ == "__main__":
    main()
