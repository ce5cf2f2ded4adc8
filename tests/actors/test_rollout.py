"""One episode, told step by step, and every way in which it can go wrong."""

import asyncio
import contextlib
import math
import sys

import numpy as np
import pytest

from capo.actors.blocking import ThreadedEnv
from capo.actors.chat import Chat
from capo.actors.engine import Sample
from capo.actors.rollout import action_seed, play
from capo.configs.schema import RolloutConfig
from capo.envs.api import Message, Observation, Tool
from capo.protocol.errors import EngineError
from capo.protocol.frames import encode
from capo.protocol.messages import Delivery
from capo.protocol.records import (
    EpisodeEnd,
    EpisodeStatus,
    Lease,
    Purpose,
    Step,
    Task,
    VersionSpan,
)
from capo.protocol.validate import check_end, check_step
from tests.fakes import ScriptedEngine, ScriptedEnv, transition

CONFIG = RolloutConfig(max_action_tokens=8, env_timeout_s=5.0, engine_timeout_s=5.0)


def lease(purpose: Purpose = Purpose.TRAIN, seed: int = 7) -> Lease:
    return Lease(
        lease_id="l",
        attempt=2,
        task=Task("t", b"payload"),
        group_id="g",
        member=0,
        purpose=purpose,
        seed=seed,
        policy_version=0,
    )


@pytest.fixture
def chat(word_tokenizer) -> Chat:
    return Chat(word_tokenizer, max_length=128)


def engine_saying(chat: Chat, *texts: str) -> ScriptedEngine:
    return ScriptedEngine([chat.encode(f"{text}<|im_end|>") for text in texts])


def run(env, chat, engine, config=CONFIG, the_lease=None) -> list[Step | EpisodeEnd]:
    async def collect() -> list[Step | EpisodeEnd]:
        return [record async for record in play(the_lease or lease(), env, chat, engine, config)]

    records = asyncio.run(collect())
    for record in records[:-1]:
        assert isinstance(record, Step)
        check_step(record)
    assert isinstance(records[-1], EpisodeEnd)
    check_end(records[-1])
    assert records[-1].num_steps == len(records) - 1
    encode(Delivery(sequence=1, steps=tuple(records[:-1]), ends=(records[-1],)))
    return records


def sequences(steps: list[Step]) -> list[np.ndarray]:
    """The full sequences, put together from `keep` as a learner does it."""
    out: list[np.ndarray] = []
    for step in steps:
        before = out[-1][: step.keep] if out else np.empty(0, np.int32)
        out.append(np.concatenate([before, step.observation, step.action]))
    return out


def test_a_terminated_episode_tells_every_transition(chat: Chat) -> None:
    env = ScriptedEnv(
        [
            transition("you see the cup", reward=0.25, info={"found": 1.0}),
            transition(reward=1.0, terminated=True, outcome=1.0),
        ]
    )
    engine = engine_saying(chat, "look", "take the cup")
    *steps, end = run(env, chat, engine)
    assert [step.index for step in steps] == [0, 1]
    assert [step.reward for step in steps] == [0.25, 1.0]
    assert [step.state_key for step in steps] == ["start", "you see the cup"]
    assert steps[0].info == {"found": 1.0}
    assert all(step.episode_id == "l.2" for step in steps)
    assert chat.decode(steps[1].action) == "take the cup<|im_end|>"
    assert [action.text for action in env.actions] == ["look", "take the cup"]
    assert env.resets == [(Task("t", b"payload"), 7)]
    assert end.status is EpisodeStatus.TERMINATED
    assert end.outcome == 1.0
    assert end.final_observation is None
    assert end.metrics["action_tokens"] == 6


def test_steps_rebuild_exactly_what_the_engine_read(chat: Chat) -> None:
    env = ScriptedEnv([transition("a"), transition("b"), transition("c", terminated=True)])
    engine = engine_saying(chat, "look", "take", "put")
    *steps, _ = run(env, chat, engine)
    for prompt, step, full in zip(engine.prompts, steps, sequences(steps), strict=True):
        np.testing.assert_array_equal(full, np.concatenate([prompt, step.action]))
    assert steps[1].keep == len(engine.prompts[0]) + len(steps[0].action)


def test_a_rebuilt_prompt_keeps_the_common_start_and_rebuilds_exactly(chat: Chat) -> None:
    again = Observation(messages=(Message("user", "look to the cup"),), rebuilt=True)
    env = ScriptedEnv([transition(observation=again), transition(terminated=True)])
    engine = engine_saying(chat, "go")
    *steps, _ = run(env, chat, engine)
    assert 0 < steps[1].keep < len(engine.prompts[0])
    np.testing.assert_array_equal(sequences(steps)[1][: len(engine.prompts[1])], engine.prompts[1])


def test_a_truncated_episode_carries_the_prompt_for_its_bootstrap(chat: Chat) -> None:
    env = ScriptedEnv([transition("you see nothing", truncated=True)])
    *steps, end = run(env, chat, engine_saying(chat, "look"))
    assert end.status is EpisodeStatus.TRUNCATED
    final = np.concatenate([sequences(steps)[-1][: end.final_keep], end.final_observation])
    messages = [
        Message("user", "look"),
        Message("assistant", "look"),
        Message("user", "you see nothing"),
    ]
    assert chat.decode(final) == chat.render(messages, ())


def test_terminated_wins_over_truncated(chat: Chat) -> None:
    env = ScriptedEnv([transition(terminated=True, truncated=True)])
    assert run(env, chat, engine_saying(chat, "go"))[-1].status is EpisodeStatus.TERMINATED


def test_a_prompt_without_room_truncates_and_is_cut_to_the_models_length(word_tokenizer) -> None:
    chat = Chat(word_tokenizer, max_length=24)
    env = ScriptedEnv([transition("look " * 30)])
    *steps, end = run(env, chat, engine_saying(chat, "look"))
    assert end.status is EpisodeStatus.TRUNCATED
    assert end.metrics["overlong"] == 1.0
    assert end.final_keep + len(end.final_observation) == 24
    assert end.final_keep == len(sequences(steps)[-1])


def test_a_first_prompt_without_room_names_the_setting(word_tokenizer) -> None:
    chat = Chat(word_tokenizer, max_length=8)
    long = ScriptedEnv([], first=Observation(messages=(Message("user", "look " * 30),)))
    (end,) = run(long, chat, engine_saying(chat, "look"))
    assert end.status is EpisodeStatus.ENV_ERROR
    assert "model.max_length 8" in end.error


def test_the_engine_is_asked_with_room_temperature_and_a_seed_per_step(chat: Chat) -> None:
    env = ScriptedEnv([transition(), transition(terminated=True)])
    engine = engine_saying(chat, "go")
    run(env, chat, engine)
    assert [call["temperature"] for call in engine.calls] == [1.0, 1.0]
    assert [call["max_tokens"] for call in engine.calls] == [8, 8]
    assert [call["seed"] for call in engine.calls] == [action_seed(7, 0), action_seed(7, 1)]
    assert len({action_seed(s, i) for s in range(20) for i in range(20)}) == 400
    assert all(0 <= action_seed(s, 0) < 2**62 for s in range(100))


def test_greedy_evaluation_is_temperature_zero(chat: Chat) -> None:
    engine = engine_saying(chat, "go")
    run(
        ScriptedEnv([transition(terminated=True)]),
        chat,
        engine,
        the_lease=lease(Purpose.EVAL_GREEDY),
    )
    assert engine.calls[0]["temperature"] == 0.0


def test_an_action_cut_by_length_is_counted_and_has_no_stop_token(chat: Chat) -> None:
    config = RolloutConfig(max_action_tokens=2)
    *steps, end = run(
        ScriptedEnv([transition(terminated=True)]),
        chat,
        engine_saying(chat, "take the cup"),
        config,
    )
    assert chat.decode(steps[0].action) == "take the"
    assert end.metrics["actions_cut"] == 1.0


def raising(error: BaseException):
    """A step of a script that raises what must not be raised while the script is made."""

    def answer(action):
        raise error

    return answer


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Tensor:
    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")

    def __repr__(self) -> str:
        sys.exit("and it cannot be shown")


@pytest.mark.parametrize(
    ("script", "told", "complaint"),
    [
        ([ValueError("broken door")], 0, "step raised ValueError: broken door"),
        ([transition(), RuntimeError("fire")], 1, "step raised RuntimeError: fire"),
        ([transition(reward=math.nan)], 0, "nan as reward"),
        ([transition(reward=math.inf)], 0, "inf as reward"),
        ([transition(reward="1")], 0, "'1' as reward"),
        ([transition(reward=None)], 0, "None as reward"),
        ([transition(reward=[1, 2])], 0, "[1, 2] as reward"),
        ([transition(outcome=math.nan, terminated=True)], 0, "nan as outcome"),
        ([transition(info={"x": math.nan})], 0, "nan as info['x']"),
        ([transition(info=None)], 0, "None as info, which is not a dict"),
        ([transition(info={1: 1.0})], 0, "1 as a name in info, which is not a string"),
        ([transition(observation=("obs", {}))], 1, "tuple where an Observation belongs"),
        ([lambda action: "nonsense"], 0, "step returned a str"),
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
        ([transition(reward=b"1")], 0, "b'1' as reward"),
        ([transition(reward=10**400)], 0, "as reward: int too large"),
        ([transition(reward=Tensor())], 0, "Tensor as reward: a Tensor with 2 elements"),
        ([transition(outcome=np.zeros(2))], 0, "array([0., 0.]) as outcome"),
        ([transition(terminated=np.array([True, False]))], 0, "False]) as terminated"),
        ([transition(terminated="yes")], 0, "'yes' as terminated, which is not a bool"),
        ([transition(truncated=None)], 0, "None as truncated, which is not a bool"),
        ([transition(info={"\ud800": 1.0})], 0, "surrogates not allowed"),
        ([transition(info={"mask": np.ones(3)})], 0, "as info['mask']"),
    ],
)
def test_an_environments_failure_is_an_env_error_and_no_reward(
    chat: Chat, script, told: int, complaint: str
) -> None:
    *steps, end = run(ScriptedEnv(script), chat, engine_saying(chat, "go"))
    assert len(steps) == told
    assert end.status is EpisodeStatus.ENV_ERROR
    assert complaint in end.error
    assert end.outcome == 0.0


def seen(**changes) -> Observation:
    fields = {"messages": (Message("user", "look"),)}
    return Observation(**(fields | changes))


def tool(name="look", description="", parameters=None) -> Tool:
    return Tool(name, description, {} if parameters is None else parameters)


CYCLE: dict[str, object] = {}
CYCLE["again"] = CYCLE
USER = Message("user", "look")


@pytest.mark.parametrize(
    ("observation", "complaint"),
    [
        (None, "a NoneType where an Observation belongs"),
        (seen(messages=None), "None as messages, which is not a tuple"),
        (seen(messages="look"), "'look' as messages, which is not a tuple"),
        (seen(messages=USER), "as messages, which is not a tuple"),
        (seen(messages=(None,)), "None as messages[0], which is not a Message"),
        (seen(messages=(USER, "look")), "'look' as messages[1], which is not a Message"),
        (
            seen(messages=({"role": "user", "content": "x"},)),
            "as messages[0], which is not a Message",
        ),
        (
            seen(messages=(Message("user", None),)),
            "None as messages[0].content, which is not a string",
        ),
        (seen(messages=(Message("user", ["look"]),)), "['look'] as messages[0].content"),
        (
            seen(messages=(Message(None, "look"),)),
            "None as messages[0].role, which is not a string",
        ),
        (seen(messages=(Message("user", "a \udfff"),)), r"'a \udfff' as messages[0].content: "),
        (seen(messages=(Message("\ud800", "look"),)), r"'\ud800' as messages[0].role: "),
        (seen(state_key=None), "None as state_key, which is not a string"),
        (seen(state_key=3), "3 as state_key, which is not a string"),
        (seen(state_key=["a"]), "['a'] as state_key, which is not a string"),
        (seen(state_key="\ud800"), r"'\ud800' as state_key: "),
        (seen(rebuilt=np.array([True, False])), "False]) as rebuilt, which is not a bool"),
        (seen(rebuilt=None), "None as rebuilt, which is not a bool"),
        (seen(tools=None), "None as tools, which is not a tuple"),
        (seen(tools=np.ones(4)), "as tools, which is not a tuple"),
        (seen(tools=(None,)), "None as tools[0], which is not a Tool"),
        (seen(tools=(tool(), "look")), "'look' as tools[1], which is not a Tool"),
        (seen(tools=(tool(None),)), "None as tools[0].name, which is not a string"),
        (seen(tools=(tool(description=7),)), "7 as tools[0].description, which is not a string"),
        (seen(tools=(tool(description="\ud800"),)), r"'\ud800' as tools[0].description: "),
        (seen(tools=(tool(parameters=[1]),)), "[1] as tools[0].parameters, which is not a dict"),
        (seen(tools=(tool(parameters={"a": {1}}),)), "type set is not JSON serializable"),
        (seen(tools=(tool(parameters={"a": math.nan}),)), "nan} as tools[0].parameters: "),
        (seen(tools=(tool(parameters={"a": ["\ud800"]}),)), "surrogates not allowed"),
        (seen(tools=(tool(parameters=CYCLE),)), "as tools[0].parameters: Circular"),
    ],
)
def test_an_observation_with_a_field_of_a_wrong_type_is_an_env_error(
    chat: Chat, observation, complaint: str
) -> None:
    """After a reset, after a step that goes on and after the last one."""
    (end,) = run(ScriptedEnv([], first=observation or "no"), chat, engine_saying(chat, "go"))
    assert end.status is EpisodeStatus.ENV_ERROR
    assert observation is None or complaint in end.error
    for terminated in (False, True):
        env = ScriptedEnv([transition(observation=observation, terminated=terminated)])
        *steps, end = run(env, chat, engine_saying(chat, "go"))
        assert len(steps) == 1
        assert end.status is EpisodeStatus.ENV_ERROR
        assert complaint in end.error
        assert end.outcome == 0.0


def test_lists_and_numpys_scalars_are_taken_and_travel_as_plain_values(word_tokenizer) -> None:
    chat = Chat(word_tokenizer, max_length=1024)
    first = Observation(
        messages=[Message(np.str_("user"), np.str_("look"))],
        tools=[tool(parameters={"type": "object"})],
        rebuilt=np.bool_(False),
        state_key=np.str_("start"),
    )
    last = transition(
        reward=np.float32(0.5),
        terminated=np.bool_(True),
        truncated=np.bool_(False),
        info={np.str_("found"): np.int64(1)},
    )
    *steps, end = run(ScriptedEnv([last], first=first), chat, engine_saying(chat, "go"))
    assert end.status is EpisodeStatus.TERMINATED
    assert type(steps[0].state_key) is str
    assert steps[0].info == {"found": 1.0}
    assert {type(name) for name in steps[0].info} == {str}


@pytest.mark.parametrize("first", [("observation", {}), "text"])
def test_a_reset_that_returns_no_observation_is_an_env_error(chat: Chat, first) -> None:
    (end,) = run(ScriptedEnv([], first=first), chat, engine_saying(chat, "go"))
    assert end.status is EpisodeStatus.ENV_ERROR
    assert "where an Observation belongs" in end.error


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


def test_a_step_is_told_before_the_next_action_is_sampled(chat: Chat) -> None:
    async def scenario() -> int:
        engine = engine_saying(chat, "go")
        async for record in play(
            lease(), ScriptedEnv([transition(), transition()]), chat, engine, CONFIG
        ):
            assert isinstance(record, Step)
            return len(engine.calls)
        raise AssertionError("no record came")

    assert asyncio.run(scenario()) == 1


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
        (sample(logprobs=np.array([-1.0, math.nan], np.float32)), "of which 1 are finite"),
        (sample(logprobs=np.array([-1.0], np.float32)), "1 log-probs for an action of 2"),
        (sample(logprobs=np.array([-1.0, -1.0])), "log-probs that are not a vector of float32"),
        (sample(tokens=[3, 4]), "tokens that are not a vector of int32"),
        (sample(entropies=np.array([math.inf, 0.0], np.float32)), "2 entropies for an action of 2"),
        (sample(versions=(VersionSpan(0, 1),)), "version spans that do not cover its 2 tokens"),
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
