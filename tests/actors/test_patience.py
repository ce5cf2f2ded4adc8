"""What is late is given up, but not what came while this process itself stood still."""

import asyncio
import time

import pytest

from capo.actors.patience import OverdueError, abandon, within


async def answer(after_s: float, ended: list[str]) -> str:
    try:
        await asyncio.sleep(after_s)
    except asyncio.CancelledError:
        ended.append("cancelled")
        raise
    ended.append("answered")
    return "here"


def test_what_comes_in_time_is_returned_and_what_it_raises_is_raised() -> None:
    async def fails() -> None:
        raise ZeroDivisionError("no")

    async def scenario() -> None:
        assert await within(answer(0.01, []), 5.0) == "here"
        with pytest.raises(ZeroDivisionError, match="no"):
            await within(fails(), 5.0)

    asyncio.run(scenario())


def test_what_does_not_come_is_cancelled_and_named_with_its_limit() -> None:
    async def scenario() -> None:
        with pytest.raises(OverdueError, match=r"nothing came within 0\.1 s"):
            await within(answer(60, ended), 0.1)
        await asyncio.sleep(0.01)
        assert ended == ["cancelled"]  # before the loop ends, which cancels everything

    ended: list[str] = []
    asyncio.run(scenario())


def test_an_answer_that_came_while_the_loop_stood_still_is_read() -> None:
    async def scenario() -> str:
        asyncio.get_running_loop().call_later(0.01, time.sleep, 0.6)
        return await within(answer(0.1, []), 0.3)

    assert asyncio.run(scenario()) == "here"


def test_a_caller_that_is_cancelled_cancels_what_it_waits_for() -> None:
    async def scenario() -> None:
        waiting = asyncio.create_task(within(answer(60, ended), 60.0))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0.01)
        assert ended == ["cancelled"]  # before the loop ends, which cancels everything

    ended: list[str] = []
    asyncio.run(scenario())


def test_what_an_abandoned_task_still_raises_is_not_reported() -> None:
    async def raises_late() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ZeroDivisionError

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        task = asyncio.create_task(raises_late())
        await asyncio.sleep(0)
        abandon(task)
        await asyncio.sleep(0.01)
        assert task.done()
        del task

    reported: list[dict[str, object]] = []
    asyncio.run(scenario())
    assert reported == []
