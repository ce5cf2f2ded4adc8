"""An actor's part in a broadcast, with a scripted engine; what it says is kept in order."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from capo.actors.engine import UnreachableStoreError
from capo.actors.weight_duty import WeightDuty
from capo.protocol.errors import WeightSyncError
from capo.protocol.messages import (
    GroupAccept,
    GroupForm,
    GroupFormed,
    GroupInvite,
    UpdateWeights,
    WeightsReport,
)
from tests.actors.worker_world import FORM, update
from tests.fakes import ScriptedEngine

INVITE = GroupInvite(epoch=3)


class WaitingEngine(ScriptedEngine):
    """Joins no group and receives no weights until it is cancelled."""

    def __init__(self) -> None:
        super().__init__([])
        self.given_up: list[str] = []

    async def form_group(self, form: GroupForm) -> None:
        await self._wait(f"group {form.epoch}")

    async def update_weights(self, update: UpdateWeights) -> WeightsReport:
        await self._wait(f"version {update.version}")
        raise AssertionError("too late")

    async def _wait(self, what: str) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.given_up.append(what)
            raise


@asynccontextmanager
async def on_duty(engine: ScriptedEngine, said: list[object]) -> AsyncIterator[WeightDuty]:
    """`said` gets what is sent to the learner, and "settled" for every broadcast that is over."""

    async def send(message: object) -> None:
        said.append(message)

    async with asyncio.TaskGroup() as tasks:
        yield WeightDuty(engine, send, lambda report: said.append("settled"), tasks)


def test_it_accepts_joins_and_reports_and_then_the_broadcast_is_settled() -> None:
    async def scenario() -> None:
        async with on_duty(engine, said) as duty:
            for message in (INVITE, FORM, update(4)):
                await duty.handle(message)
                await asyncio.sleep(0.01)

    engine, said = ScriptedEngine([]), []
    engine.workers = 2
    asyncio.run(scenario())
    assert said[:2] == [GroupAccept(epoch=3, workers=2), GroupFormed(epoch=3)]
    assert (said[2].epoch, said[2].version, said[2].error) == (3, 4, "")
    assert said[3:] == ["settled"]


@pytest.mark.parametrize(
    ("error", "reached"),
    [(WeightSyncError("no answer"), True), (UnreachableStoreError("no route"), False)],
)
def test_a_group_that_cannot_be_joined_is_told_with_whether_the_learner_was_reached(
    error: WeightSyncError, reached: bool
) -> None:
    async def scenario() -> None:
        async with on_duty(engine, said) as duty:
            await duty.handle(FORM)

    engine, said = ScriptedEngine([]), []
    engine.form_error = error
    asyncio.run(scenario())
    assert said == [GroupFormed(epoch=3, error=str(error), reached=reached)]


@pytest.mark.parametrize("newer", [INVITE, FORM], ids=["an invitation", "a group"])
def test_what_is_newer_ends_the_wait_for_an_older_group(newer: GroupInvite | GroupForm) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(10), on_duty(engine, said) as duty:
            await duty.handle(FORM)
            await asyncio.sleep(0.01)
            await duty.handle(newer)
            await asyncio.sleep(0.01)
            given_up.extend(engine.given_up)
            duty.stop()

    engine, said, given_up = WaitingEngine(), [], []
    asyncio.run(scenario())
    assert given_up == ["group 3"]
    assert not any(isinstance(message, GroupFormed) for message in said)


def test_stopped_it_waits_for_no_group_and_no_weights() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(10), on_duty(engine, said) as duty:
            await duty.handle(FORM)
            await duty.handle(update(4))
            await asyncio.sleep(0.01)
            duty.stop()

    engine, said = WaitingEngine(), []
    asyncio.run(scenario())
    assert sorted(engine.given_up) == ["group 3", "version 4"]
    assert said == []


@pytest.mark.parametrize("message", [INVITE, FORM, update(4)], ids=lambda one: type(one).__name__)
def test_a_broken_engine_takes_part_in_nothing(message) -> None:
    async def scenario() -> None:
        async with on_duty(engine, said) as duty:
            await duty.handle(message)

    engine, said = ScriptedEngine([]), []
    engine.broken = "its weights are not the learner's"
    asyncio.run(scenario())
    assert said == []
    assert engine.forms == []
    assert engine.updates == []
