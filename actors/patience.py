"""Waiting with a limit that counts only time in which this process itself ran.

An actor may stand still (it was stopped, or an environment blocked its loop); what its engine
answered in the meantime has arrived, and is read as soon as it runs again.
"""

import asyncio
import math
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class OverdueError(Exception):
    """What was waited for did not come in time."""


async def within(work: Awaitable[T], limit_s: float) -> T:
    """What `work` returns or raises; OverdueError after `limit_s`, and it is cancelled.

    Waiting goes in slices, and each counts once, however long it really took.
    """
    slice_s = min(1.0, limit_s / 10)
    task = asyncio.ensure_future(work)
    try:
        for _ in range(math.ceil(limit_s / slice_s)):
            done, _ = await asyncio.wait({task}, timeout=slice_s)
            if done:
                return task.result()
    except asyncio.CancelledError:
        abandon(task)
        raise
    abandon(task)
    raise OverdueError(f"nothing came within {limit_s:g} s")


def abandon(task: "asyncio.Future[Any]") -> None:
    """Nobody waits for it any longer: it is cancelled, and what it still raises is not reported."""
    task.cancel()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
