"""Environments of one actor, made when needed and used again; one that failed is thrown away."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from capo.actors.blocking import in_thread, make_env
from capo.actors.guards import env_call
from capo.envs.api import Env
from capo.protocol.errors import EnvError

CLOSE_S = 1.0


class EnvPool:
    """`make` builds one environment; it may block, so it runs in a thread."""

    def __init__(self, make: Callable[[], Any], timeout_s: float) -> None:
        self._make = make
        self._timeout_s = timeout_s
        self._idle: list[Env] = []

    async def take(self) -> Env:
        """Raises EnvError when none can be made in time."""
        if self._idle:
            return self._idle.pop()
        return await env_call(
            "make", lambda: in_thread(lambda: make_env(self._make)), self._timeout_s
        )

    def give_back(self, env: Env) -> None:
        self._idle.append(env)

    async def discard(self, env: Env) -> None:
        """Close it, but neither wait long for that nor mind how it ends."""
        with contextlib.suppress(EnvError):
            await env_call("close", lambda: env.close(), CLOSE_S)

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        await asyncio.gather(*(self.discard(env) for env in idle))
