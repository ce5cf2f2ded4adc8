"""Other ways to bring the same records to another process: bare pyzmq, JSON over HTTP, pickle.

One sender, one receiver (this process), as fast as it goes; the receiver's clocks are read after a
warm-up and at the end. Nothing is validated, ordered, acked or kept by any of these.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from itertools import cycle
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

import msgspec
import zmq

from benchmarks._fleet_load import Load
from capo.protocol.frames import encode
from capo.protocol.messages import Delivery

WARM_UP_S = 1.0
POSTS_AT_ONCE = 8
SPAWN = multiprocessing.get_context("spawn")


class Rate(NamedTuple):
    steps_per_s: float
    processor_us: float  # of the receiving process, per step


class Meter:
    """Counts between a warm-up and an end that it announces."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begin = 0.0
        self._processor = 0.0
        self._num_steps = 0
        self.over = False
        self.rate = Rate(0.0, 0.0)

    def count(self, num_steps: int) -> None:
        now = time.perf_counter()
        if not self._begin:
            self._begin = now + WARM_UP_S
        if now < self._begin:
            self._processor = time.process_time()
            return
        self._num_steps += num_steps
        if now - self._begin >= self._seconds and not self.over:
            self.over = True
            processor_s = time.process_time() - self._processor
            self.rate = Rate(
                self._num_steps / (now - self._begin), processor_s / self._num_steps * 1e6
            )


def bare_pyzmq(load: Load, seconds: float) -> Rate:
    meter = Meter(seconds)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 30_000)
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        process = _start(_send_bare, f"tcp://127.0.0.1:{port}", load, seconds)
        while not meter.over:
            socket.recv_multipart()
            meter.count(load.steps_per_delivery)
    _end(process)
    return meter.rate


def pickle_queue(load: Load, seconds: float) -> Rate:
    meter = Meter(seconds)
    queue: Queue[Delivery] = SPAWN.Queue(maxsize=64)
    process = _start(_send_queue, queue, load, seconds)
    while not meter.over:
        meter.count(len(queue.get(timeout=30).steps))
    _end(process)
    queue.close()
    return meter.rate


def json_http(load: Load, seconds: float) -> Rate:
    """Raises ImportError without aiohttp."""
    return asyncio.run(_serve_http(load, seconds))


async def _serve_http(load: Load, seconds: float) -> Rate:
    from aiohttp import web

    meter = Meter(seconds)
    over = asyncio.Event()

    async def take(request: web.Request) -> web.Response:
        meter.count(len(msgspec.json.decode(await request.read())["steps"]))
        if meter.over:
            over.set()
        return web.Response()

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/", take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=1.0)
    await site.start()
    port = runner.addresses[0][1]
    process = _start(_send_http, f"http://127.0.0.1:{port}/", load, seconds)
    async with asyncio.timeout(seconds + 60):
        await over.wait()
    _end(process)
    await runner.cleanup()
    return meter.rate


def _send_bare(address: str, load: Load, seconds: float) -> None:
    messages = [encode(delivery) for delivery in load.round()]
    deadline = time.monotonic() + seconds + 30
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDTIMEO, 30_000)
    socket.connect(address)
    for frames in cycle(messages):
        if time.monotonic() > deadline:
            break
        socket.send_multipart(frames, copy=False)


def _send_queue(queue: "Queue[Delivery]", load: Load, seconds: float) -> None:
    deadline = time.monotonic() + seconds + 30
    for delivery in cycle(load.round()):
        if time.monotonic() > deadline:
            break
        queue.put(delivery, timeout=30)


def _send_http(address: str, load: Load, seconds: float) -> None:
    asyncio.run(_post(address, load, seconds))


async def _post(address: str, load: Load, seconds: float) -> None:
    import aiohttp

    deadline = time.monotonic() + seconds + 30
    deliveries = cycle(load.round())

    async def post(session: aiohttp.ClientSession) -> None:
        while time.monotonic() < deadline:
            body = msgspec.json.encode(next(deliveries), enc_hook=lambda array: array.tolist())
            async with session.post(address, data=body) as response:
                await response.read()

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        for _ in range(POSTS_AT_ONCE):
            tasks.create_task(post(session))


def _start(body: Callable[..., None], *arguments: Any) -> multiprocessing.process.BaseProcess:
    process = SPAWN.Process(target=body, args=arguments, daemon=True)
    process.start()
    return process


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """The sender would go on until its own limit; nothing it has is wanted any more."""
    process.terminate()
    process.join(30)
