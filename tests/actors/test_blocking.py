"""Environments with plain methods: off the loop, in one thread, left behind when they hang."""

import asyncio
import threading
import time

import pytest

from capo.actors.blocking import ThreadedEnv, make_env
from capo.envs.api import Action, Message, Observation
from capo.protocol.records import Task
from tests.fakes import ScriptedEnv, transition

TASK = Task("t", b"")


class Plain:
    def __init__(self) -> None:
        self.threads = [threading.get_ident()]
        self.closed = False

    def reset(self, task: Task, seed: int) -> Observation:
        self.threads.append(threading.get_ident())
        return Observation(messages=(Message("user", f"seed {seed}"),))

    def step(self, action: Action):
        self.threads.append(threading.get_ident())
        if action.text == "raise":
            raise KeyError("door")
        time.sleep(0.1 if action.text == "slow" else 0.0)
        return transition(action.text)

    def close(self) -> None:
        self.closed = True


def test_every_call_runs_in_one_thread_that_is_not_the_loops() -> None:
    made: list[Plain] = []

    async def scenario() -> None:
        env = ThreadedEnv(lambda: made.append(Plain()) or made[-1])
        assert (await env.reset(TASK, 3)).messages[0].content == "seed 3"
        answer = await env.step(Action(text="go"))
        assert answer.observation.messages[0].content == "go"
        await env.close()

    asyncio.run(scenario())
    (plain,) = made
    assert len(set(plain.threads)) == 1
    assert threading.get_ident() not in plain.threads
    assert plain.closed


def test_the_loop_runs_while_an_environment_blocks() -> None:
    async def scenario() -> int:
        env = ThreadedEnv(Plain)
        step = asyncio.create_task(env.step(Action(text="slow")))
        turns = 0
        while not step.done():
            await asyncio.sleep(0.001)
            turns += 1
        await env.close()
        return turns

    assert asyncio.run(scenario()) > 5


def test_what_it_raises_reaches_the_caller_and_the_next_call_works() -> None:
    async def scenario() -> None:
        env = ThreadedEnv(Plain)
        with pytest.raises(KeyError, match="door"):
            await env.step(Action(text="raise"))
        assert (await env.step(Action(text="go"))).reward == 0.0
        await env.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("raised", "reaches"),
    [
        (SystemExit(3), SystemExit),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (GeneratorExit(), GeneratorExit),
        (asyncio.CancelledError(), asyncio.CancelledError),
        (StopIteration(), RuntimeError),  # no future can carry the first
    ],
)
def test_what_would_end_a_process_reaches_the_caller_and_the_thread_lives(raised, reaches) -> None:
    class Leaving(Plain):
        def step(self, action: Action):
            if action.text == "leave":
                raise raised
            return super().step(action)

    async def scenario() -> None:
        env = ThreadedEnv(Leaving)
        async with asyncio.timeout(5):
            with pytest.raises(reaches):
                await env.step(Action(text="leave"))
            assert (await env.step(Action(text="go"))).reward == 0.0
            await env.close()

    asyncio.run(scenario())


def test_a_call_that_was_given_up_does_not_disturb_the_next() -> None:
    async def scenario() -> None:
        env = ThreadedEnv(Plain)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.step(Action(text="slow")), 0.01)
        assert (await env.step(Action(text="go"))).observation.messages[0].content == "go"
        await env.close()

    asyncio.run(scenario())


def test_async_environments_are_taken_as_they_are_and_plain_ones_get_a_thread() -> None:
    async def scenario() -> None:
        env = ScriptedEnv([])
        assert make_env(lambda: env) is env
        threaded = make_env(Plain)
        assert isinstance(threaded, ThreadedEnv)
        await threaded.reset(TASK, 0)
        await threaded.close()

    asyncio.run(scenario())
