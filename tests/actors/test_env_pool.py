"""A pool outlives whatever an environment does while it is made or closed."""

import asyncio
import sys
import threading

import pytest

from capo.actors.env_pool import EnvPool
from capo.protocol.errors import EnvError
from tests.fakes import ScriptedEnv


def ends_the_process() -> None:
    sys.exit(3)


async def waits_for_ever() -> None:
    await asyncio.Event().wait()


async def ends_the_process_later() -> None:
    await asyncio.sleep(0)
    raise KeyboardInterrupt


async def cancels_its_own_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@pytest.mark.parametrize(
    "close",
    [
        None,
        lambda: None,
        ends_the_process,
        ends_the_process_later,
        waits_for_ever,
        cancels_its_own_task,
    ],
)
def test_discarding_an_environment_raises_nothing_however_it_closes(close) -> None:
    async def scenario() -> None:
        env = ScriptedEnv([])
        env.close = close
        pool = EnvPool(lambda: env, 5.0)
        await pool.discard(await pool.take())
        pool.give_back(env)
        await pool.close()

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_cancelled_while_it_discards_a_pool_stops_waiting() -> None:
    async def scenario() -> None:
        env = ScriptedEnv([])
        env.close = waits_for_ever
        discarding = asyncio.create_task(EnvPool(lambda: env, 5.0).discard(env))
        await asyncio.sleep(0.01)
        discarding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await discarding

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "error",
    [
        OSError("no licence"),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        StopIteration(),
        asyncio.CancelledError(),
        TimeoutError("the simulator"),
    ],
)
def test_an_environment_that_cannot_be_made_is_an_env_error(error: BaseException) -> None:
    def make() -> None:
        raise error

    async def scenario() -> None:
        with pytest.raises(EnvError, match=f"make raised .*{type(error).__name__}"):
            await EnvPool(make, 5.0).take()

    asyncio.run(scenario())


def test_environments_that_hang_while_they_are_made_hold_up_nothing_else() -> None:
    """More of them than asyncio has threads; the process can still end, too."""

    def make() -> None:
        assert release.wait(60)
        raise OSError("too late")

    async def scenario() -> None:
        pool = EnvPool(make, 0.2)
        hung = await asyncio.gather(*(pool.take() for _ in range(50)), return_exceptions=True)
        assert {str(error) for error in hung} == {
            "make did not return within rollout.env_timeout_s = 0.2 s"
        }
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 5) == "free"

    release = threading.Event()
    try:
        asyncio.run(asyncio.wait_for(scenario(), 20))
    finally:
        release.set()
