"""Environments of one actor, made when needed and used again; one that failed is thrown away."""

import asyncio
from collections.abc import Callable
from typing import Any

from capo.actors.blocking import make_env
from capo.envs.api import Env
from capo.protocol.errors import EnvError


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
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.to_thread(make_env, self._make)
        except TimeoutError as error:
            raise EnvError(
                f"an environment was not made within rollout.env_timeout_s = {self._timeout_s:g} s"
            ) from error
        except Exception as error:  # anything a foreign factory raises
            raise EnvError(
                f"the environment cannot be made: {type(error).__name__}: {error}"
            ) from error

    def give_back(self, env: Env) -> None:
        self._idle.append(env)

    async def discard(self, env: Env) -> None:
        """Close it, but neither wait long for that nor mind how it ends."""
        closing = asyncio.ensure_future(env.close())
        await asyncio.wait({closing}, timeout=1.0)
        closing.cancel()
        closing.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        await asyncio.gather(*(self.discard(env) for env in idle))
