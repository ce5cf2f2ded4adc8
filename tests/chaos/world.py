"""A world of a few words for tests of faults; what goes wrong in it is in its options.

A task asks for a letter; the reward is the share of the answer's words that are it. `fault` happens
in every `fault_every`-th game (by the lease's seed), in its second step: see `misbehave`.
"""

import asyncio
import time

from msgspec import Struct

from capo.envs.api import Action, Message, Observation, Options, Split, Transition
from capo.envs.registry import read_options
from capo.protocol.records import Task

LETTERS = ("a", "b", "c", "d", "e", "f")
SIZES = {"train": 96, "valid": 16, "test": 16}


class WorldOptions(Struct, frozen=True, forbid_unknown_fields=True):
    turns: int = 4
    step_s: float = 0.0  # how long the world thinks
    fault: str = ""
    fault_every: int = 4


class World:
    def __init__(self, options: WorldOptions) -> None:
        self._options = options
        self._letter = ""
        self._turn = 0
        self._faulty = False

    async def reset(self, task: Task, seed: int) -> Observation:
        self._letter = task.payload.decode()
        self._turn = 0
        every = self._options.fault_every
        self._faulty = self._options.fault != "" and seed % every == 0
        return self._observe()

    async def step(self, action: Action) -> Transition:
        await asyncio.sleep(self._options.step_s)
        self._turn += 1
        if self._faulty and self._turn == 2:
            return await misbehave(self._options.fault, self._observe())
        words = action.text.split()
        return Transition(
            observation=self._observe(),
            reward=words.count(self._letter) / max(1, len(words)),
            terminated=self._turn == self._options.turns,
            truncated=False,
            outcome=float(self._letter in words),
        )

    async def close(self) -> None:
        pass

    def _observe(self) -> Observation:
        text = f"say {self._letter}"
        return Observation(messages=(Message("user", text),), state_key=f"{text} {self._turn}")


async def misbehave(fault: str, observation: Observation) -> Transition:
    """What environments do wrong: raise, hang, or return what is no reward or no text."""
    reward: object = 0.0
    if fault == "raise":
        raise RuntimeError("the kitchen burns")
    if fault == "hang":
        await asyncio.sleep(3600.0)
    if fault == "block":
        time.sleep(4.0)  # longer than the learner waits for a sign of life
    if fault == "nan":
        reward = float("nan")
    if fault == "word":
        reward = "well done"
    if fault == "nonsense":
        return "well done"  # type: ignore[return-value]
    if fault == "text":
        observation = Observation(messages=(Message("user", "say a " * (10_000_000 // 6)),))
    return Transition(
        observation=observation,
        reward=reward,
        terminated=False,
        truncated=False,  # type: ignore[arg-type]
    )


class WorldFactory:
    def __init__(self, options: WorldOptions) -> None:
        self._options = options

    def tasks(self, split: Split) -> list[Task]:
        return [
            Task(f"{split}-{index}", LETTERS[index % len(LETTERS)].encode())
            for index in range(SIZES[split])
        ]

    def make(self) -> World:
        return World(self._options)

    def words(self) -> tuple[str, ...]:
        return ("say", *LETTERS)


def make(options: Options) -> WorldFactory:
    return WorldFactory(read_options(options, WorldOptions))
