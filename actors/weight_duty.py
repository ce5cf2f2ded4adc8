"""An actor's part in a broadcast: it accepts, joins, receives, and tells how it went.

Messages come in order from one task and return at once; what takes long runs as a task of the group
that is handed in. A newer invitation ends whatever an older epoch still waits for.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from capo.actors.engine import Engine, UnreachableStoreError
from capo.protocol.errors import CapoError
from capo.protocol.messages import (
    GroupAccept,
    GroupForm,
    GroupFormed,
    GroupInvite,
    ToLearner,
    UpdateWeights,
    WeightsReport,
)


class WeightDuty:
    """`send` tells the learner; `settled` is called after every broadcast, good or bad."""

    def __init__(
        self,
        engine: Engine,
        send: Callable[[ToLearner], Awaitable[None]],
        settled: Callable[[WeightsReport], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._engine = engine
        self._send = send
        self._settled = settled
        self._tasks = tasks
        self._forming: asyncio.Task[None] | None = None
        self._receiving: asyncio.Task[None] | None = None

    async def handle(self, message: GroupInvite | GroupForm | UpdateWeights) -> None:
        if self._engine.broken:
            return
        if isinstance(message, GroupInvite):
            self._stop_forming()
            await self._send(GroupAccept(epoch=message.epoch, workers=self._engine.workers))
        elif isinstance(message, GroupForm):
            self._stop_forming()
            self._forming = self._start(self._form(message))
        else:
            self._receiving = self._start(self._update(message))

    def stop(self) -> None:
        """Stop waiting for a group or for weights."""
        for task in (self._forming, self._receiving):
            if task is not None:
                task.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)

    def _stop_forming(self) -> None:
        if self._forming is not None:
            self._forming.cancel()

    async def _form(self, form: GroupForm) -> None:
        try:
            await self._engine.form_group(form)
        except CapoError as error:
            reached = not isinstance(error, UnreachableStoreError)
            await self._send(GroupFormed(epoch=form.epoch, error=str(error), reached=reached))
        else:
            await self._send(GroupFormed(epoch=form.epoch))

    async def _update(self, update: UpdateWeights) -> None:
        report = await self._engine.update_weights(update)
        await self._send(report)
        self._settled(report)
