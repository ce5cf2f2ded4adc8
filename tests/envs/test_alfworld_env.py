"""Episodes as an agent sees them: prompts, tool calls, rewards, ends, and the options."""

import asyncio
import json
import re
from collections.abc import Sequence

import pytest

from capo.configs.load import load
from capo.envs.alfworld import AlfworldFactory
from capo.envs.alfworld.games import Game
from capo.envs.alfworld.tasks import pack, unpack
from capo.envs.api import JSON, Action, Observation, Task, ToolCall, Transition
from capo.envs.registry import load_factory
from capo.protocol.errors import ConfigError, EnvError
from tests.envs import textworld_games
from tests.envs.small_house import TWO_MUGS_ON_SHELF, problem

WINNING = ("go to shelf 1", "take mug 2 from countertop 1", "move mug 2 to shelf 1")
GAME = Game(
    "pick_two_obj_and_place-Mug-None-Shelf-1/t",
    "put two mugs on the shelf.",
    problem(TWO_MUGS_ON_SHELF),
    WINNING,
)
TASK = pack("train", GAME)
OPTIONS: dict[str, JSON] = {
    "success_reward": 10.0,
    "format_reward": 0.25,
    "invalid_penalty": 0.5,
    "max_steps": 5,
}


def act(command: JSON) -> Action:
    return Action(text="…", tool_calls=(ToolCall("act", {"command": command}),))


async def play(
    actions: Sequence[Action], task: Task = TASK, **options: JSON
) -> tuple[Observation, list[Transition]]:
    env = AlfworldFactory({**OPTIONS, **options}).make()
    first = await env.reset(task, seed=0)
    transitions = [await env.step(action) for action in actions]
    await env.close()
    return first, transitions


def played(
    actions: Sequence[Action], task: Task = TASK, **options: JSON
) -> tuple[Observation, list[Transition]]:
    return asyncio.run(play(actions, task, **options))


def user_text(observation: Observation) -> str:
    assert [message.role for message in observation.messages] == ["system", "user"]
    return observation.messages[1].content


def listed(observation: Observation) -> list[str]:
    """The admissible commands as the prompt lists them."""
    found = re.search(r"Admissible commands:\n(.*?)\n\n", user_text(observation), re.DOTALL)
    assert found
    return found[1].split("\n")


def test_every_prompt_is_whole_with_task_observation_commands_and_one_tool() -> None:
    first, (after,) = played([act("go to shelf 1")])
    for observation in (first, after.observation):
        assert observation.rebuilt
        assert "put two mugs on the shelf." in user_text(observation)
        assert [tool.name for tool in observation.tools] == ["act"]
    assert "You are in the middle of a room." in user_text(first)
    assert "You are in the middle of a room." not in user_text(after.observation)
    assert "You arrive at shelf 1. On the shelf 1" in user_text(after.observation)
    assert "take mug 1 from shelf 1" in listed(after.observation)
    assert "take mug 1 from shelf 1" not in listed(first)
    schema = first.tools[0].parameters
    assert schema["required"] == ["command"]


def test_the_prompt_repeats_as_many_commands_as_history_says() -> None:
    actions = [act("go to shelf 1"), act("look"), act("go to fridge 1"), act("inventory")]
    for history, expected in ((2, ["go to fridge 1", "inventory"]), (0, None)):
        _, transitions = played(actions, history=history)
        found = re.search(r"oldest first:\n(.*?)\n\n", user_text(transitions[-1].observation), re.S)
        assert (found[1].split("\n") if found else None) == expected


def test_winning_ends_the_episode_with_the_success_reward() -> None:
    _, transitions = played([act(command) for command in WINNING])
    assert [t.reward for t in transitions] == [0.25, 0.25, 10.25]
    assert [t.terminated for t in transitions] == [False, False, True]
    assert [t.outcome for t in transitions] == [0.0, 0.0, 1.0]
    assert not any(t.truncated for t in transitions)


def test_an_episode_is_cut_off_after_max_steps_whatever_was_done() -> None:
    _, transitions = played([act("look"), Action(text="?"), act("look")], max_steps=3)
    assert [t.truncated for t in transitions] == [False, False, True]
    assert not any(t.terminated for t in transitions)


def test_winning_with_the_last_step_is_an_end_and_no_cut() -> None:
    _, transitions = played([act(command) for command in WINNING], max_steps=3)
    assert (transitions[-1].terminated, transitions[-1].truncated) == (True, False)


CALL = ToolCall("act", {"command": "look"})


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (Action(text="I think."), "no tool calls, where exactly one"),
        (Action(text="", tool_calls=(CALL, CALL)), "2 tool calls, where exactly one"),
        (Action(text="", malformed="The JSON is cut off."), "The JSON is cut off."),
        (Action(text="", tool_calls=(CALL,), malformed="One was broken."), "One was broken."),
        (Action(text="", tool_calls=(ToolCall("step", {"command": "look"}),)), "no tool 'step'"),
        (Action(text="", tool_calls=(ToolCall("act", {}),)), "one argument"),
        (Action(text="", tool_calls=(ToolCall("act", {"command": "look", "x": 1}),)), "one arg"),
        (act(7), "one argument"),
        (act(["look"]), "one argument"),
        (act("open fridge 1"), "'open fridge 1' is not one of the admissible"),
        (act("LOOK"), "'LOOK' is not one of the admissible"),
        (act(""), "'' is not one of the admissible"),
    ],
)
def test_an_answer_that_is_not_one_admissible_command_costs_and_is_explained_once(
    action: Action, said: str
) -> None:
    first, (bad, good) = played([action, act("look")])
    assert bad.reward == -0.5
    assert bad.info == {"valid_action": 0.0}
    assert said in user_text(bad.observation)
    assert bad.observation.state_key == first.state_key
    assert listed(bad.observation) == listed(first)
    assert (good.reward, good.info) == (0.25, {"valid_action": 1.0})
    assert said not in user_text(good.observation)


def test_spaces_around_a_command_do_not_matter() -> None:
    _, (transition,) = played([act(" look\n")])
    assert transition.info == {"valid_action": 1.0}


def test_equal_states_have_equal_keys_on_every_path() -> None:
    first, transitions = played([act("go to shelf 1"), act("look"), act("go to fridge 1")])
    keys = [first.state_key, *(t.observation.state_key for t in transitions)]
    assert keys[1] == keys[2]
    assert len(set(keys)) == 3


def test_a_reset_starts_afresh() -> None:
    async def twice() -> None:
        env = AlfworldFactory(OPTIONS).make()
        first = await env.reset(TASK, seed=0)
        await env.step(act("go to shelf 1"))
        assert await env.reset(TASK, seed=1) == first

    asyncio.run(twice())


def test_stepping_before_a_reset_is_refused() -> None:
    with pytest.raises(EnvError, match="before reset"):
        asyncio.run(AlfworldFactory({}).make().step(act("look")))


def test_a_game_that_cannot_be_played_is_named() -> None:
    with pytest.raises(EnvError, match="the game x/y cannot be played: the text is not one"):
        played([], task=pack("train", Game("x/y", "do.", "")))


def test_playing_needs_no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    _, transitions = played([act("look")], data="/nowhere")
    assert transitions[0].info == {"valid_action": 1.0}


def test_a_demonstration_is_the_walkthrough_in_tool_calls_that_win() -> None:
    shown = AlfworldFactory(OPTIONS).demonstrate(TASK, seed=0)
    calls = []
    for _, text in shown:
        found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text)
        assert found
        calls.append(ToolCall(**json.loads(found[1])))
    assert [call.arguments["command"] for call in calls] == list(WINNING)
    first, transitions = played([Action(text="", tool_calls=(call,)) for call in calls])
    assert transitions[-1].outcome == 1.0
    before = [first, *(transition.observation for transition in transitions)]
    assert [observation for observation, _ in shown] == before[:-1]


def test_a_walkthrough_that_does_not_win_is_no_demonstration() -> None:
    losing = pack("train", Game(GAME.id, GAME.task, GAME.problem, ("look",)))
    with pytest.raises(EnvError, match="does not win"):
        AlfworldFactory({}).demonstrate(losing, seed=0)


def test_tasks_are_the_games_of_the_split_and_demonstrations_of_real_ones_fit() -> None:
    factory = AlfworldFactory({"data": str(textworld_games.data())})
    tasks = factory.tasks("valid")
    assert len(tasks) == len({task.id for task in tasks}) == 140
    assert tasks == factory.tasks("valid")
    assert {unpack(task).id for task in tasks} == {g.id for g in textworld_games.valid_seen()}
    lengths = [len(factory.demonstrate(task, seed=0)) for task in tasks]
    assert max(lengths) <= 20  # the paper's horizon


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_step": 3}, "no key 'max_step'; did you mean 'max_steps'"),
        ({"zzz": 3}, "no key 'zzz'; it has data"),
        ({"max_steps": "many"}, "Expected `int`"),
        ({"max_steps": 0}, "max_steps is 0; it must be at least 1"),
        ({"history": -1}, "history is -1; it must be at least 0"),
        ({"invalid_penalty": -0.1}, "invalid_penalty is -0.1"),
        ({"format_reward": float("nan")}, "format_reward is nan"),
        ({"families": ["look_at_obj"]}, "did you mean 'look_at_obj_in_light'"),
        ({"families": []}, "families is empty"),
        ({"valid": "train"}, "the same games twice"),
    ],
)
def test_impossible_options_are_refused_with_a_hint(options: dict[str, JSON], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        AlfworldFactory(options)
    assert "\n" not in str(refused.value)


def test_options_travel_as_json() -> None:
    assert AlfworldFactory(json.loads(json.dumps(OPTIONS))).make()


def test_the_shipped_configuration_names_this_factory_and_its_options() -> None:
    environment = load("configs/alfworld.toml").environment
    factory = load_factory(environment.factory, environment.options)
    assert isinstance(factory, AlfworldFactory)
    assert {"success_reward", "format_reward", "invalid_penalty"} <= environment.options.keys()
