"""What an engine's order may take; a stand-in for vLLM is enough, nothing here is about it."""

import asyncio
import time

import pytest

from capo.actors.vllm_core import LONGEST_ORDER_S, VllmCore
from capo.protocol.errors import EngineError, WeightSyncError


class Llm:
    errored = False

    async def abort(self, requests):
        self.aborted = requests


def test_an_order_that_is_not_carried_out_breaks_the_engine_by_name():
    async def scenario():
        core = VllmCore(Llm(), limit_s=0.3)
        with pytest.raises(EngineError, match=r"hangs: it did not pause within 0\.3 s"):
            await core.call("pause", asyncio.sleep(60))
        assert "did not pause" in core.broken
        assert core.llm.aborted == []

    asyncio.run(scenario())


def test_time_in_which_the_actor_itself_stood_still_is_not_the_engines():
    async def scenario():
        core = VllmCore(Llm(), limit_s=1.0)
        asyncio.get_running_loop().call_later(0.1, time.sleep, 2.0)  # as an environment may
        assert await core.call("pause", asyncio.sleep(0.3, "paused")) == "paused"
        assert core.broken == ""

    asyncio.run(scenario())


def test_what_an_order_raises_is_told_apart_from_a_hang():
    async def fail():
        raise ValueError("no such method")

    async def scenario():
        core = VllmCore(Llm(), limit_s=1.0)
        with pytest.raises(WeightSyncError, match="could not resume: no such method"):
            await core.call("resume", fail())
        assert core.broken == ""

    asyncio.run(scenario())


def test_an_order_that_is_cancelled_does_not_run_on():
    async def scenario():
        core = VllmCore(Llm(), limit_s=60.0)
        ended = asyncio.Event()

        async def order():
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        calling = asyncio.ensure_future(core.call("pause", order()))
        await asyncio.sleep(0.05)
        calling.cancel()
        await asyncio.wait_for(ended.wait(), 5)
        assert core.broken == ""

    asyncio.run(scenario())


def test_an_order_may_not_take_as_long_as_a_long_action():
    assert VllmCore(Llm(), limit_s=600.0)._limit_s == LONGEST_ORDER_S


def test_an_overdue_action_breaks_an_engine_that_has_answered_nothing_since():
    async def scenario():
        core = VllmCore(Llm(), limit_s=60.0)
        begun_at = time.monotonic()
        core._answered_at = begun_at + 1.0  # another request came back: this one is only slow
        await core.overdue(begun_at)
        assert core.broken == ""
        await core.overdue(begun_at + 2.0)
        assert "the inference engine hangs: it has answered nothing for" in core.broken
        assert core.llm.aborted == []

    asyncio.run(scenario())
