"""Clients as the tests make them, and the loop that they run on."""

import asyncio

import zmq

from capo.protocol.client import ActorClient
from tests.protocol.wire import LIMIT_S, make_hello, wait_until


def make_client(address: str, actor_id: str = "actor-1", **options) -> ActorClient:
    options = {"resend_after_s": 0.3, "hello_timeout_s": 0.3} | options
    return ActorClient(address, lambda: make_hello(actor_id), **options)


def run(main) -> None:
    """Run an async test; none may take forever."""

    async def limited():
        async with asyncio.timeout(2 * LIMIT_S):
            await main

    asyncio.run(limited())


async def until(condition, what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what)


async def next_of(messages, kind: type):
    async for message in messages:
        if isinstance(message, kind):
            return message
    raise AssertionError(f"no {kind.__name__} came")


def free_address() -> str:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
