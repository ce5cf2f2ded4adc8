"""One running AsyncLLM: requests and control calls with their errors told apart, and its end.

Whatever vLLM raises becomes EngineError if the engine is dead or was told something it refuses, and
WeightSyncError if only a control call failed. Knows neither actions nor policy versions.
"""

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import Awaitable
from itertools import count
from typing import Any, NoReturn, TypedDict, TypeVar

from capo.actors.engine import UnreachableStoreError
from capo.actors.patience import OverdueError, within
from capo.protocol.errors import EngineError, WeightSyncError
from capo.protocol.records import IntArray

POLL_S = 0.004
LONGEST_ORDER_S = 120.0

T = TypeVar("T")


class JobState(TypedDict):
    """What a worker says of the job that it was given last; it crosses vLLM's RPC as a dict."""

    busy: bool
    error: str  # "" = it succeeded, or is still busy
    reached: bool  # False: the error is that the learner's store could not be reached


class VllmCore:
    """Owns `llm`. `broken` once set stays set.

    An engine that does not carry out an order within `limit_s` seconds, at most LONGEST_ORDER_S,
    hangs and is broken.
    """

    def __init__(self, llm: Any, limit_s: float) -> None:
        self.llm = llm
        self._limit_s = min(limit_s, LONGEST_ORDER_S)
        self._broken = ""
        self._answered_at = -math.inf
        self._next_request = count()
        self._requests: set[str] = set()

    @property
    def broken(self) -> str:
        """Also notices a core that died while nothing was asked of it."""
        if not self._broken and self.llm is not None and self.llm.errored:
            self._broken = "the inference engine's process died"
        return self._broken

    def give_up(self, reason: str) -> None:
        """`broken` from now on; the first reason stays."""
        self._broken = self._broken or reason

    async def final(self, prompt: IntArray, parameters: Any) -> Any:
        """The final output of one request; EngineError for whatever vLLM raises instead."""
        if self.broken:
            raise EngineError(self.broken)
        inputs = {"type": "token", "prompt_token_ids": prompt.tolist()}
        request = str(next(self._next_request))
        self._requests.add(request)
        result = None
        try:
            async for output in self.llm.generate(inputs, parameters, request):
                result = output
                self._answered_at = time.monotonic()
        except Exception as error:  # vLLM's own classes share no base
            if self.llm.errored:
                self.give_up(f"the inference engine died ({type(error).__name__}: {error})")
                raise EngineError(self.broken) from error
            raise EngineError(f"the engine refused a request: {error}") from error
        finally:
            self._requests.discard(request)
        if result is None:
            raise EngineError("the engine ended a request without an answer")
        return result

    async def call(self, what: str, order: Awaitable[T], more_s: float = 0.0) -> T:
        """What a control call returns, which may take `more_s` seconds longer than others.

        Raises EngineError if the engine is dead or hangs, WeightSyncError if only the call failed.
        """
        try:
            return await self.within_limit(what, order, more_s)
        except EngineError:
            raise
        except Exception as error:  # vLLM wraps a worker's exception in classes without a base
            if self.llm.errored:
                raise EngineError(
                    f"the inference engine died when it was told to {what}: {error}"
                ) from error
            raise WeightSyncError(f"the engine could not {what}: {error}") from error

    async def within_limit(self, what: str, work: Awaitable[T], more_s: float = 0.0) -> T:
        """What `work` returns or raises; EngineError, and `broken`, when it takes too long."""
        limit_s = self._limit_s + more_s
        try:
            result = await within(work, limit_s)
        except OverdueError:
            return await self._hang(f"it did not {what} within {limit_s:g} s")
        self._answered_at = time.monotonic()
        return result

    async def overdue(self, begun_at: float) -> None:
        """A request begun at `begun_at` is overdue; if nothing has come since, the engine hangs."""
        if self._answered_at < begun_at and not self.broken:
            with contextlib.suppress(EngineError):
                await self._hang(f"it has answered nothing for {time.monotonic() - begun_at:.0f} s")

    async def _hang(self, how: str) -> NoReturn:
        self.give_up(f"the inference engine hangs: {how}")
        await self.end_requests_if_broken()
        raise EngineError(self.broken)

    async def finished(self, what: str, timeout_s: float) -> None:
        """Wait for what the workers do in a thread. Their own limit comes first.

        Raises WeightSyncError if it failed there, UnreachableStoreError if that is why.
        """
        deadline = time.monotonic() + timeout_s + 5.0
        while True:
            states: list[JobState] = await self.call(
                f"report on {what}", self.llm.collective_rpc("capo_state")
            )
            for state in states:
                if state["error"] and not state["reached"]:
                    raise UnreachableStoreError(state["error"])
                if state["error"]:
                    raise WeightSyncError(state["error"])
            if not any(state["busy"] for state in states):
                return
            if time.monotonic() > deadline:
                raise WeightSyncError(f"{what}: the workers did not finish in {timeout_s:g} s")
            await asyncio.sleep(POLL_S)

    async def end_requests_if_broken(self) -> None:
        """What is in flight in a broken, perhaps paused engine ends now, as an EngineError."""
        if self.broken and not self.llm.errored:
            await self.llm.abort(list(self._requests))

    async def close(self) -> None:
        self.give_up("the engine was closed")
        llm, self.llm = self.llm, None
        if llm is not None:
            resources = llm.engine_core.resources
            await asyncio.to_thread(llm.shutdown, 5.0)
            # vLLM closes its sockets, but not their context, which warns when it is collected.
            await asyncio.to_thread(resources.ctx.term)
        del llm
        gc.collect()  # it is in a cycle, and its __del__ fails once the interpreter goes down
