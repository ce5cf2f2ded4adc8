"""Environments whose methods block, each in a thread of its own, behind the async protocol.

One thread per environment: many simulators may be used only from the thread that made them. They
are daemons, so that one that never returns is left behind and does not keep the process alive.
"""

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from capo.envs.api import Action, Env, Observation, Transition
from capo.protocol.records import Task

T = TypeVar("T")


class BlockingEnv(Protocol):
    """`capo.envs.api.Env` with plain methods."""

    def reset(self, task: Task, seed: int) -> Observation: ...

    def step(self, action: Action) -> Transition: ...

    def close(self) -> None: ...


class ThreadedEnv:
    """An `Env` that runs a BlockingEnv, made by `make`, in one thread."""

    def __init__(self, make: Callable[[], BlockingEnv]) -> None:
        self._make = make
        self._env: BlockingEnv | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="environment", daemon=True)
        self._thread.start()

    async def reset(self, task: Task, seed: int) -> Observation:
        return await self._call(lambda: self._open().reset(task, seed))

    async def step(self, action: Action) -> Transition:
        return await self._call(lambda: self._open().step(action))

    async def close(self) -> None:
        try:
            await self._call(self._close)
        finally:
            self._calls.put(None)

    def _open(self) -> BlockingEnv:
        if self._env is None:
            self._env = self._make()
        return self._env

    def _close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    async def _call(self, method: Callable[[], T]) -> T:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put(_settling(answer, method))
        return await answer


async def in_thread(method: Callable[[], T]) -> T:
    """What `method` returns or raises, from a thread of its own: asyncio's few are for others."""
    answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    thread = threading.Thread(target=_settling(answer, method), name="environment", daemon=True)
    thread.start()
    return await answer


def _settling(answer: "asyncio.Future[T]", method: Callable[[], T]) -> Callable[[], None]:
    """Runs `method` in any thread and tells the loop of `answer`. Raises nothing."""
    loop = answer.get_loop()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():  # nobody waits for it any longer
            return
        if isinstance(error, StopIteration):  # no future takes it; a coroutine does the same
            answer.set_exception(RuntimeError("the environment raised StopIteration"))
        elif error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(cast(T, result))

    def run() -> None:
        result, error = None, None
        try:
            result = method()
        except BaseException as caught:  # crosses into the awaiting task
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    return run


def make_env(make: Callable[[], Any]) -> Env:
    """What `make` builds, as an `Env`: itself when its methods are coroutines, else in a thread.

    One whose methods block is built twice: it has to be made in the thread in which it is used.
    """
    env = make()
    if inspect.iscoroutinefunction(env.step) and inspect.iscoroutinefunction(env.reset):
        return cast(Env, env)
    env.close()
    return ThreadedEnv(make)
