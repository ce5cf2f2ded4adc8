"""A scripted engine and a scripted environment, for tests that are about neither."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from capo.actors.engine import Sample
from capo.envs.api import Action, Message, Observation, Transition
from capo.protocol.errors import EngineError
from capo.protocol.messages import GroupForm, UpdateWeights, WeightsReport
from capo.protocol.records import IntArray, Task, VersionSpan


class ScriptedEngine:
    """Says `answers` in turn, over and over; an exception among them is raised."""

    def __init__(self, answers: Sequence[IntArray | Exception], version: int = 0) -> None:
        self.answers = answers
        self.version = version
        self.broken = ""
        self.workers = 1
        self.calls: list[dict[str, object]] = []
        self.prompts: list[IntArray] = []
        self.delay_s = 0.0
        self.hold: asyncio.Event | None = None  # wait for it before every answer
        self.forms: list[GroupForm] = []
        self.updates: list[UpdateWeights] = []
        self.form_error: Exception | None = None
        self.update_error = ""
        self.closed = False

    async def generate(
        self,
        prompt: IntArray,
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        index = len(self.calls)
        self.prompts.append(prompt)
        self.calls.append({"max_tokens": max_tokens, "temperature": temperature, "seed": seed})
        if self.hold is not None:
            await self.hold.wait()
        await asyncio.sleep(self.delay_s)
        if self.broken:
            raise EngineError(self.broken)
        answer = self.answers[index % len(self.answers)]
        if isinstance(answer, Exception):
            raise answer
        tokens = answer[:max_tokens]
        return Sample(
            tokens=tokens,
            logprobs=np.full(len(tokens), -0.5, dtype=np.float32),
            versions=(VersionSpan(self.version, len(tokens)),),
            stopped=int(tokens[-1]) in stop_token_ids,
        )

    async def overdue(self, begun_at: float) -> None:
        pass

    async def form_group(self, form: GroupForm) -> None:
        self.forms.append(form)
        if self.form_error is not None:
            raise self.form_error

    async def update_weights(self, update: UpdateWeights) -> WeightsReport:
        self.updates.append(update)
        if self.update_error:
            self.broken = self.update_error
        else:
            self.version = update.version
        return WeightsReport(epoch=update.epoch, version=update.version, error=self.update_error)

    async def close(self) -> None:
        self.closed = True


Answer = Callable[[Action], Transition]


class ScriptedEnv:
    """Answers with `script` in turn: transitions, functions of the action, or errors to raise."""

    def __init__(
        self,
        script: Sequence[Transition | Answer | Exception],
        first: Observation | Exception | None = None,
    ) -> None:
        self.script = script
        self.first = first or Observation(messages=(Message("user", "look"),), state_key="start")
        self.actions: list[Action] = []
        self.resets: list[tuple[Task, int]] = []
        self.closed = False

    async def reset(self, task: Task, seed: int) -> Observation:
        self.resets.append((task, seed))
        self.actions = []
        if isinstance(self.first, Exception):
            raise self.first
        return self.first

    async def step(self, action: Action) -> Transition:
        answer = self.script[len(self.actions)]
        self.actions.append(action)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Transition) else answer(action)

    async def close(self) -> None:
        self.closed = True


def transition(text: str = "you see nothing", **changes: object) -> Transition:
    fields: dict[str, object] = {
        "observation": Observation(messages=(Message("user", text),), state_key=text),
        "reward": 0.0,
        "terminated": False,
        "truncated": False,
    }
    return Transition(**(fields | changes))  # type: ignore[arg-type]
