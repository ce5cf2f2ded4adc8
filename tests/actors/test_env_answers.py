"""What an environment returns is checked field by field, by way of a whole episode."""

import math
import sys

import numpy as np
import pytest

from capo.actors.chat import Chat
from capo.envs.api import Message, Observation
from capo.protocol.records import EpisodeStatus
from tests.actors.scripted_episode import USER, assert_env_error, engine_saying, run, seen, tool
from tests.fakes import ScriptedEnv, transition


class Tensor:
    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")

    def __repr__(self) -> str:
        sys.exit("and it cannot be shown")


@pytest.mark.parametrize(
    ("script", "told", "complaint"),
    [
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
def test_a_transition_with_an_unusable_field_is_an_env_error_and_no_reward(
    chat: Chat, script, told: int, complaint: str
) -> None:
    assert_env_error(run(ScriptedEnv(script), chat, engine_saying(chat, "go")), told, complaint)


CYCLE: dict[str, object] = {}


CYCLE["again"] = CYCLE


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
        assert_env_error(run(env, chat, engine_saying(chat, "go")), 1, complaint)


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
