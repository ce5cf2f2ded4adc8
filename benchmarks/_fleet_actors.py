"""The actors of a simulated fleet: many connections in one process, without engines.

Each plays what it is granted by sending made-up steps, numbers its deliveries, and keeps no more
of them unacked than it is told. It resends nothing: on a loopback that loses nothing, a missing ack
is a fault that the benchmark has to show.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection

import uvloop
import zmq
from msgspec import Struct

from benchmarks._fleet_load import STEPS_PER_EPISODE, Load
from capo.protocol.frames import Frame, FrameDecoder, encode
from capo.protocol.link import SETUP_LIMITS
from capo.protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    ActorHeartbeat,
    Goodbye,
    Grant,
    Hello,
    LearnerHeartbeat,
    Refused,
    Revoke,
    ToActor,
    Welcome,
)
from capo.protocol.sockets import Parts, Pump

HEARTBEAT_S = 5.0
SETTLE_S = 60.0
SAMPLES = 100_000  # of the time from delivery to ack


class Told(Struct, frozen=True):
    """What one process of actors saw."""

    acked_steps: int
    unacked_steps: int
    processor_s: float
    ack_s: list[float]
    fault: str


class Actor:
    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        name: str,
        load: Load,
        capacity: int,
        max_unacked: int,
        ack_s: deque[float],
    ) -> None:
        self.acked_steps = 0
        self.unacked: deque[tuple[int, int, float]] = deque()  # sequence, steps, when
        self.stopped = False
        self.fault = ""
        self._load = load
        self._max_unacked = max_unacked
        self._ack_s = ack_s
        self._sequence = 0
        self._places: deque[tuple[str, int]] = deque()
        self._blocked: list[Frame] | None = None
        self._decoder: FrameDecoder[ToActor] = FrameDecoder(ToActor, SETUP_LIMITS)
        socket = context.socket(zmq.DEALER)
        socket.connect(address)
        self._pump = Pump(socket, SETUP_LIMITS, self._receive, self._play, self._fail)
        self._say(
            Hello(
                protocol_version=PROTOCOL_VERSION,
                actor_id=name,
                actor_name=name,
                capacity=capacity,
                weights_version=0,
            )
        )

    def beat(self) -> None:
        if self._blocked is None:
            self._pump.send(encode(ActorHeartbeat(running=len(self._places))))

    def leave(self) -> None:
        self._pump.send(encode(Goodbye(reason="the benchmark is over")))
        self._pump.close(linger_ms=500)

    def _say(self, message: Hello) -> None:
        if not self._pump.send(encode(message)):
            self._blocked = encode(message)

    def _receive(self, parts: Parts) -> None:
        message = self._decoder.decode(parts)
        now = time.perf_counter()
        if isinstance(message, Ack):
            while self.unacked and self.unacked[0][0] <= message.sequence:
                _, num_steps, sent = self.unacked.popleft()
                self.acked_steps += num_steps
                self._ack_s.append(now - sent)
        elif isinstance(message, Grant):
            self._places += [(lease.episode_id, 0) for lease in message.leases]
        elif isinstance(message, Revoke):
            gone = set(message.episode_ids)
            self._places = deque(place for place in self._places if place[0] not in gone)
        elif isinstance(message, Refused):
            self.fault = self.fault or message.reason
        elif not isinstance(message, Welcome | LearnerHeartbeat):
            self.fault = self.fault or f"the learner sent {type(message).__name__}"
        self._play()

    def _play(self) -> None:
        if self._blocked is not None:
            if not self._pump.send(self._blocked):
                return
            self._blocked = None
        while self._places and not self.stopped and len(self.unacked) < self._max_unacked:
            count = min(self._load.steps_per_delivery, len(self._places))
            places = [self._places.popleft() for _ in range(count)]
            self._places += [(one, i + 1) for one, i in places if i + 1 < STEPS_PER_EPISODE]
            self._sequence += 1
            self.unacked.append((self._sequence, count, time.perf_counter()))
            frames = encode(self._load.delivery(self._sequence, places))
            if not self._pump.send(frames):
                self._blocked = frames
                return

    def _fail(self, error: Exception) -> None:
        self.fault = self.fault or repr(error)


def play(
    orders: Connection,
    address: str,
    names: Sequence[str],
    load: Load,
    capacity: int,
    max_unacked: int,
    limit_s: float,
) -> None:
    """The body of one process: plays until anything comes from `orders` or `limit_s` are over, and
    sends back what it Told."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        told = runner.run(_play(orders, address, names, load, capacity, max_unacked, limit_s))
    orders.send(told)


async def _play(
    orders: Connection,
    address: str,
    names: Sequence[str],
    load: Load,
    capacity: int,
    max_unacked: int,
    limit_s: float,
) -> Told:
    ack_s: deque[float] = deque(maxlen=SAMPLES)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.max_sockets = len(names) + 16
    actors = [Actor(context, address, name, load, capacity, max_unacked, ack_s) for name in names]
    deadline = time.monotonic() + limit_s
    beat_at = time.monotonic() + HEARTBEAT_S
    while not orders.poll() and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        if time.monotonic() >= beat_at:
            beat_at += HEARTBEAT_S
            for actor in actors:
                actor.beat()
    for actor in actors:
        actor.stopped = True
    settled = time.monotonic() + SETTLE_S
    while any(actor.unacked for actor in actors) and time.monotonic() < settled:
        await asyncio.sleep(0.05)
    for actor in actors:
        actor.leave()
    await asyncio.to_thread(context.term)
    return Told(
        acked_steps=sum(actor.acked_steps for actor in actors),
        unacked_steps=sum(count for actor in actors for _, count, _ in actor.unacked),
        processor_s=time.process_time(),
        ack_s=list(ack_s),
        fault=next((actor.fault for actor in actors if actor.fault), ""),
    )
