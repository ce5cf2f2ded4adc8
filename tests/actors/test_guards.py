"""Environments and engines that raise, hang or say too much end their episode, not the actor."""

import asyncio
import contextlib
import math
import sys

import numpy as np
import pytest

from capo.actors.blocking import ThreadedEnv
from capo.actors.chat import Chat
from capo.actors.engine import Sample
from capo.actors.rollout import play
from capo.configs.schema import RolloutConfig
from capo.envs.api import Message, Observation
from capo.protocol.errors import EngineError
from capo.protocol.records import EpisodeEnd, EpisodeStatus, Step, VersionSpan
from tests.actors.scripted_episode import (
    CONFIG,
    USER,
    assert_env_error,
    engine_saying,
    lease,
    raising,
    run,
    seen,
    tool,
)
from tests.fakes import ScriptedEngine, ScriptedEnv, transition


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("script", "told", "complaint"),
    [
        ([ValueError("broken door")], 0, "step raised ValueError: broken door"),
        ([transition(), RuntimeError("fire")], 1, "step raised RuntimeError: fire"),
        (
            [transition(observation=Observation(messages=(), rebuilt=True))],
            1,
            "rebuilt observation without messages",
        ),
        ([raising(asyncio.CancelledError())], 0, "step raised CancelledError"),
        ([lambda action: asyncio.current_task().cancel() and transition()], 0, "its own task"),
        ([raising(SystemExit(3))], 0, "step raised SystemExit: 3"),
        ([raising(SystemExit())], 0, "step raised SystemExit"),
        ([raising(KeyboardInterrupt())], 0, "step raised KeyboardInterrupt"),
        ([raising(GeneratorExit())], 0, "step raised GeneratorExit"),
        ([raising(StopIteration())], 0, "StopIteration"),
        ([ValueError("door \ud800")], 0, r"step raised ValueError: door \ud800"),
        ([Unreadable()], 0, "step raised Unreadable"),
    ],
)
def test_what_an_environment_raises_is_an_env_error_and_no_reward(
    chat: Chat, script, told: int, complaint: str
) -> None:
    assert_env_error(run(ScriptedEnv(script), chat, engine_saying(chat, "go")), told, complaint)


def test_a_reset_that_is_no_coroutine_is_an_env_error(chat: Chat) -> None:
    env = ScriptedEnv([])
    env.reset = lambda task, seed: None
    (end,) = run(env, chat, engine_saying(chat, "go"))
    assert end.status is EpisodeStatus.ENV_ERROR
    assert "not a coroutine function" in end.error


def test_a_reset_that_raises_is_an_env_error(chat: Chat) -> None:
    (end,) = run(ScriptedEnv([], first=OSError("no game")), chat, engine_saying(chat, "go"))
    assert end.status is EpisodeStatus.ENV_ERROR
    assert end.error == "reset raised OSError: no game"


@pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt(), GeneratorExit()])
def test_a_reset_that_would_end_the_process_is_an_env_error(chat: Chat, error) -> None:
    env = ScriptedEnv([])
    env.reset = lambda task, seed: raising(error)(None)  # before there is a coroutine
    (end,) = run(env, chat, engine_saying(chat, "go"))
    assert end.status is EpisodeStatus.ENV_ERROR
    assert f"reset raised {type(error).__name__}" in end.error


def test_an_environment_in_a_thread_that_would_end_the_process_is_an_env_error(chat: Chat) -> None:
    class Plain:
        def reset(self, task, seed):
            return Observation(messages=(USER,))

        def step(self, action):
            sys.exit(3)

        def close(self):
            sys.exit(4)

    async def scenario() -> list[Step | EpisodeEnd]:
        env = ThreadedEnv(Plain)
        try:
            engine = engine_saying(chat, "go")
            return [record async for record in play(lease(), env, chat, engine, CONFIG)]
        finally:
            with contextlib.suppress(SystemExit):
                await env.close()

    (end,) = asyncio.run(scenario())
    assert end.status is EpisodeStatus.ENV_ERROR
    assert end.error == "step raised SystemExit: 3"


def test_a_hung_environment_is_left_behind_even_if_it_ignores_cancellation(chat: Chat) -> None:
    class Deaf(ScriptedEnv):
        async def step(self, action):
            while not release.is_set():
                try:
                    await asyncio.sleep(0.02)
                except asyncio.CancelledError:
                    cancelled.set()
            raise AssertionError("too late")

    async def scenario() -> list[Step | EpisodeEnd]:
        config = RolloutConfig(env_timeout_s=0.1)
        records = [
            record
            async for record in play(lease(), Deaf([]), chat, engine_saying(chat, "go"), config)
        ]
        await asyncio.wait_for(cancelled.wait(), 5)
        release.set()
        await asyncio.sleep(0.05)
        return records

    release, cancelled = asyncio.Event(), asyncio.Event()
    (end,) = asyncio.run(scenario())
    assert end.status is EpisodeStatus.ENV_ERROR
    assert end.error == "step did not return within rollout.env_timeout_s = 0.1 s"


def test_the_engines_failure_is_an_engine_error(chat: Chat) -> None:
    go = chat.encode("go<|im_end|>")
    engine = ScriptedEngine([go, EngineError("a log-prob of nan")])
    *steps, end = run(ScriptedEnv([transition(), transition()]), chat, engine)
    assert len(steps) == 1
    assert end.status is EpisodeStatus.ENGINE_ERROR
    assert end.error == "a log-prob of nan"


def test_an_engine_that_does_not_answer_is_an_engine_error(chat: Chat) -> None:
    engine = engine_saying(chat, "go")
    engine.delay_s = 30.0
    config = RolloutConfig(engine_timeout_s=0.05)
    (end,) = run(ScriptedEnv([transition()]), chat, engine, config)
    assert end.status is EpisodeStatus.ENGINE_ERROR
    assert "engine_timeout_s = 0.05" in end.error


def test_cancelling_an_episode_cancels_what_it_waits_for(chat: Chat) -> None:
    class Slow(ScriptedEnv):
        async def step(self, action):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

    async def scenario() -> None:
        async def consume() -> None:
            async for _ in play(lease(), Slow([]), chat, engine_saying(chat, "go"), CONFIG):
                pass

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    seen: list[str] = []
    asyncio.run(scenario())
    assert seen == ["cancelled"]


def sample(**changes) -> Sample:
    fields = {
        "tokens": np.array([3, 4], np.int32),
        "logprobs": np.array([-1.0, -1.0], np.float32),
        "versions": (VersionSpan(0, 2),),
        "stopped": False,
    }
    return Sample(**(fields | changes))


class StrangeEngine(ScriptedEngine):
    """Returns `what` as it is, or raises it."""

    def __init__(self, what: Sample | Exception) -> None:
        super().__init__([])
        self.what = what

    async def generate(self, prompt, **_):
        if isinstance(self.what, Exception):
            raise self.what
        return self.what


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (sample(tokens=np.empty(0, np.int32)), "without a token"),
        (
            sample(logprobs=np.array([-1.0, math.nan], np.float32)),
            "a log-prob of nan for a token that it sampled",
        ),
        (sample(logprobs=np.array([-1.0], np.float32)), "1 log-probs for an action of 2"),
        (sample(logprobs=np.array([-1.0, -1.0])), "log-probs that are not a vector of float32"),
        (sample(tokens=[3, 4]), "tokens that are not a vector of int32"),
        (sample(entropies=np.array([math.inf, 0.0], np.float32)), "an entropy of inf for a token"),
        (sample(entropies=np.array([1.0], np.float32)), "1 entropies for an action of 2"),
        (sample(versions=()), "policy versions for 0 of the 2 tokens"),
        (sample(versions=(VersionSpan(0, 1),)), "policy versions for 1 of the 2 tokens"),
        (None, "a NoneType, not a Sample"),
        (RuntimeError("illegal memory access"), "raised RuntimeError: illegal memory access"),
    ],
)
def test_what_no_policy_says_is_the_engines_error(chat: Chat, what, sentence: str) -> None:
    (end,) = run(ScriptedEnv([transition()]), chat, StrangeEngine(what))
    assert end.status is EpisodeStatus.ENGINE_ERROR
    assert sentence in end.error


FLOOD = "say a " * 2_000_000


@pytest.mark.parametrize(
    ("observation", "complaint"),
    [
        (seen(messages=(Message("user", FLOOD),)), "12,000,004 characters"),
        (seen(messages=(Message(FLOOD, ""),)), "12,000,000 characters"),
        (seen(messages=(Message("u", FLOOD[:9_000]), Message("u", FLOOD[:9_000]))), "18,002 char"),
        (seen(tools=(tool(FLOOD),)), "12,000,091 characters"),
        (seen(tools=(tool("look", FLOOD),)), "12,000,095 characters"),
        (seen(tools=(tool("look", "", {"a": [FLOOD]}),)), "12,000,104 characters"),
        (seen(messages=(Message("", ""),) * 1000), "1,000 messages"),
        (seen(tools=(tool("", ""),) * 1000), "83,008 characters"),
    ],
)
def test_a_flood_of_text_is_an_env_error_before_it_is_rendered(
    word_tokenizer, observation, complaint: str
) -> None:
    rendered = []

    class Listening(Chat):
        def render(self, messages, tools) -> str:
            rendered.append(len(messages))
            return super().render(messages, tools)

    chat = Listening(word_tokenizer, max_length=128)
    env = ScriptedEnv([transition(observation=observation)])
    *steps, end = run(env, chat, engine_saying(chat, "look"))
    assert len(steps) == 1
    assert end.status is EpisodeStatus.ENV_ERROR
    assert complaint in end.error
    assert rendered == [1]
