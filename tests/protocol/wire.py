"""A handler that remembers like a run file, an actor of bare sockets, and a bad network."""

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import zmq

from capo.protocol.frames import Limits, decode, encode
from capo.protocol.messages import (
    PROTOCOL_VERSION,
    Delivery,
    Hello,
    LearnerHeartbeat,
    ToActor,
    Welcome,
)
from capo.protocol.records import EpisodeEnd, EpisodeStatus, Step, VersionSpan

LIMIT_S = 20.0


def make_step(episode_id: str = "lease.0", index: int = 0, length: int = 2, **fields) -> Step:
    values = {
        "keep": 0,
        "observation": np.arange(3, dtype=np.int32),
        "action": np.arange(length, dtype=np.int32),
        "behaviour_logprobs": np.full(length, -0.5, np.float32),
        "versions": (VersionSpan(0, length),),
        "reward": 0.0,
    }
    return Step(episode_id=episode_id, index=index, **(values | fields))


def make_end(episode_id: str = "lease.0", num_steps: int = 1, **fields) -> EpisodeEnd:
    values = {"status": EpisodeStatus.TERMINATED, "outcome": 1.0}
    return EpisodeEnd(episode_id=episode_id, num_steps=num_steps, **(values | fields))


def make_hello(actor_id: str = "actor-1", **fields) -> Hello:
    values = {"protocol_version": PROTOCOL_VERSION, "actor_name": actor_id}
    return Hello(actor_id=actor_id, **(values | fields))


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s} s until {what}"
        time.sleep(0.005)


class Ledger:
    """A Handler whose memory is dicts with a run file's keys; it outlives its server."""

    def __init__(self, window: int = 8, heartbeat_s: float = 0.1, dead_after_s: float = 10.0):
        self.window = window
        self.heartbeat_s = heartbeat_s
        self.dead_after_s = dead_after_s
        self.run_id = "run-1"
        self.committed: dict[tuple[str, int], Step] = {}
        self.order: list[tuple[str, int]] = []
        self.ends: dict[str, EpisodeEnd] = {}
        self.last: dict[str, int] = defaultdict(int)
        self.entered = 0  # commits that were begun
        self.groups: list[int] = []  # deliveries of each commit
        self.doubled: list[object] = []
        self.hellos: list[Hello] = []
        self.controls: list[tuple[str, object]] = []
        self.losses: list[tuple[str, str]] = []
        self.ticks = 0
        self.answer = None  # instead of a Welcome
        self.commit_error: Exception | None = None
        self.gate = threading.Event()  # the writer writes while it is set
        self.gate.set()

    def hello(self, hello):
        self.hellos.append(hello)
        return self.answer or Welcome(
            run_id=self.run_id,
            learner_name="learner",
            last_sequence=self.last[hello.actor_id],
            window=self.window,
            heartbeat_s=self.heartbeat_s,
            dead_after_s=self.dead_after_s,
            setup=None,
        )

    def commit(self, deliveries):
        self.entered += 1
        assert self.gate.wait(LIMIT_S)
        if self.commit_error is not None:
            raise self.commit_error
        for actor_id, delivery in deliveries:
            if delivery.sequence != self.last[actor_id] + 1:
                self.doubled.append((actor_id, delivery.sequence))
            self.last[actor_id] = delivery.sequence
            for step in delivery.steps:
                key = (step.episode_id, step.index)
                if key in self.committed:
                    self.doubled.append(key)
                self.committed[key] = step
                self.order.append(key)
            for end in delivery.ends:
                if end.episode_id in self.ends:
                    self.doubled.append(end.episode_id)
                self.ends[end.episode_id] = end
        self.groups.append(len(deliveries))

    def control(self, actor_id, message):
        self.controls.append((actor_id, message))

    def lost(self, actor_id, reason):
        self.losses.append((actor_id, reason))

    def report(self):
        return b'{"version": 7}'

    def tick(self):
        self.ticks += 1


class RawActor:
    """An actor that does what the test says, with a plain DEALER socket."""

    def __init__(self, address: str, apply_keys: Callable[[zmq.Socket], None] | None = None):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        if apply_keys is not None:
            apply_keys(self.socket)
        self.socket.connect(address)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close(linger=0)
        self.context.term()

    def send(self, message) -> None:
        self.send_frames(encode(message))

    def send_frames(self, frames) -> None:
        self.socket.send_multipart(frames)

    def deliver(self, sequence: int, *steps: Step) -> None:
        self.send(Delivery(sequence=sequence, steps=steps))

    def receive(self, limit_s: float = LIMIT_S, heartbeats: bool = False):
        """The next message, or None if there is none in time."""
        deadline = time.monotonic() + limit_s
        while (left_s := deadline - time.monotonic()) > 0:
            if self.socket.poll(int(left_s * 1000) + 1):
                message = decode(self.socket.recv_multipart(), ToActor, Limits())
                if heartbeats or not isinstance(message, LearnerHeartbeat):
                    return message
        return None

    def introduce(self, actor_id: str = "actor-1") -> Welcome:
        self.send(make_hello(actor_id))
        welcome = self.receive()
        assert isinstance(welcome, Welcome)
        return welcome


class BadNetwork:
    """Sits between actors and a learner and drops, doubles or holds back whole messages."""

    def __init__(self, learner: str, seed: int, drop=0.1, double=0.1, delay=0.2):
        self.learner = learner
        self.random = random.Random(seed)
        self.drop, self.double, self.delay = drop, double, delay
        self.dropped = 0
        self.address = ""
        self.stop = threading.Event()
        self.bound = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def __enter__(self):
        self.thread.start()
        assert self.bound.wait(LIMIT_S)
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join(LIMIT_S)

    def _run(self):
        context = zmq.Context()
        front = context.socket(zmq.ROUTER)
        port = front.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self.bound.set()
        poller = zmq.Poller()
        poller.register(front, zmq.POLLIN)
        backs: dict[bytes, zmq.Socket] = {}
        held: list[tuple[float, zmq.Socket, list[bytes]]] = []

        def pass_on(socket, parts):
            if self.random.random() < self.drop:
                self.dropped += 1
                return
            for _ in range(2 if self.random.random() < self.double else 1):
                if self.random.random() < self.delay:
                    held.append((time.monotonic() + self.random.uniform(0, 0.05), socket, parts))
                else:
                    socket.send_multipart(parts)

        while not self.stop.is_set():
            for socket, _ in poller.poll(5):
                parts = socket.recv_multipart()
                if socket is front:
                    if parts[0] not in backs:
                        back = backs[parts[0]] = context.socket(zmq.DEALER)
                        back.connect(self.learner)
                        poller.register(back, zmq.POLLIN)
                    pass_on(backs[parts[0]], parts[1:])
                else:
                    identity = next(name for name, back in backs.items() if back is socket)
                    pass_on(front, [identity, *parts])
            now = time.monotonic()
            for entry in [entry for entry in held if entry[0] <= now]:
                held.remove(entry)
                entry[1].send_multipart(entry[2])
        context.destroy(linger=0)
