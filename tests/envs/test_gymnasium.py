"""Gymnasium's own environments, played as text."""

import asyncio

import gymnasium
import pytest

from capo.actors.blocking import make_env
from capo.envs.api import Action
from capo.envs.registry import load_factory
from capo.protocol.errors import ConfigError, EnvError

LAKE = {
    "id": "FrozenLake-v1",
    "arguments": {"is_slippery": False},
    "shown": "render",
    "action_names": ["left", "down", "right", "up"],
}
WAY = ("down", "down", "right", "right", "down", "right")  # past the holes of the 4x4 lake


def factory(**options):
    return load_factory("capo.envs.gymnasium:GymnasiumFactory", options)


def played(made, *answers, task=0):
    """The first observation and all transitions of one episode."""
    env = made.make()
    first = env.reset(made.tasks("train")[task], seed=0)
    transitions = [env.step(Action(text=answer)) for answer in answers]
    env.close()
    return first, transitions


def test_an_agent_reads_the_lake_and_walks_over_it():
    first, transitions = played(factory(**LAKE, instructions="Reach G."), *WAY)
    system, lake = first.messages
    assert system.content == "Reach G.\nAnswer with exactly one of: left, down, right, up."
    assert lake.content.splitlines() == ["", "[S]FFF", "FHFH", "FFFH", "HFFG"]
    assert [one.terminated for one in transitions] == [False] * 5 + [True]
    assert transitions[-1].outcome == transitions[-1].reward == 1.0
    assert transitions[0].observation.messages[0].content.startswith("  (Down)")


def test_a_hole_ends_it_without_success():
    _, transitions = played(factory(**LAKE), "right", "down")
    assert transitions[-1].terminated
    assert transitions[-1].outcome == 0.0


def test_an_answer_that_is_no_action_costs_a_turn_and_changes_nothing():
    made = factory(**LAKE, invalid_penalty=0.25, max_turns=7)
    _, transitions = played(made, "I think I go right", *WAY)
    assert transitions[0].reward == -0.25
    assert transitions[0].info == {"invalid": 1.0}
    assert "is not an action. Answer with" in transitions[0].observation.messages[0].content
    assert transitions[-1].outcome == 1.0
    assert not transitions[-1].truncated


def test_after_an_answer_that_is_no_action_the_state_is_still_that_of_before():
    first, transitions = played(factory(id="CartPole-v1"), "x", "1", "x", "y")
    keys = [one.observation.state_key for one in transitions]
    assert keys[0] == first.state_key == first.messages[1].content
    assert keys[1] == keys[2] == keys[3] != keys[0]


def test_the_turn_limit_truncates_also_when_nothing_was_an_action():
    _, transitions = played(factory(**LAKE, max_turns=3), "x", "up", "x")
    assert [one.truncated for one in transitions] == [False, False, True]


def test_gymnasiums_own_limit_truncates():
    made = factory(**{**LAKE, "arguments": {"is_slippery": False, "max_episode_steps": 2}})
    _, transitions = played(made, "up", "up")
    assert transitions[-1].truncated
    assert not transitions[-1].terminated


def test_a_task_is_a_seed_so_members_of_a_group_begin_alike_and_splits_differ():
    made = factory(id="CartPole-v1", train_tasks=3, valid_tasks=2, test_tasks=2)
    one, again = (played(made, "1", "0")[0].messages[1].content for _ in range(2))
    other = played(made, "1", task=1)[0].messages[1].content
    assert one == again != other
    tasks = [task for split in ("train", "valid", "test") for task in made.tasks(split)]
    assert len({task.payload for task in tasks}) == len({task.id for task in tasks}) == 7


def test_numbers_are_read_and_shown():
    _, [step] = played(factory(id="CartPole-v1"), "1")
    assert step.observation.messages[0].content.startswith("[")
    assert step.reward == 1.0


def test_success_can_be_what_info_says():
    made = factory(**{**LAKE, "success_info": "prob"})
    _, transitions = played(made, *WAY)
    assert transitions[-1].outcome == 1.0
    with pytest.raises(EnvError, match=r"without 'won' in its info, which has prob"):
        played(factory(**{**LAKE, "success_info": "won"}), *WAY)


def test_without_success_info_solved_is_a_return_above_the_threshold():
    pole = factory(id="CartPole-v1", max_turns=4, success_return=3.0)
    assert played(pole, "1", "0", "1", "0")[1][-1].outcome == 1.0
    pole = factory(id="CartPole-v1", max_turns=4, success_return=4.0)
    assert played(pole, "1", "0", "1", "0")[1][-1].outcome == 0.0


def test_one_that_was_cut_off_is_judged_by_its_return_also_after_no_action():
    pole = factory(id="CartPole-v1", max_turns=3, success_return=1.0)
    assert [one.outcome for one in played(pole, "1", "0", "x")[1]] == [0.0, 0.0, 1.0]
    assert [one.outcome for one in played(pole, "1", "x", "x")[1]] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("limit", [{"max_turns": 2}, {"arguments": {"max_episode_steps": 2}}])
def test_one_that_was_cut_off_need_not_say_whether_it_is_solved(limit):
    _, transitions = played(factory(id="CartPole-v1", success_info="won", **limit), "1", "0")
    assert transitions[-1].truncated
    assert transitions[-1].outcome == 0.0


@pytest.mark.filterwarnings("ignore:.*render_mode='ansi' that is not in")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"id": "FrozenLake-v9"}, "FrozenLake"),
        ({"id": "no_such_module_here:X-v0"}, "no_such_module_here"),
        ({"id": "FrozenLake-v1", "action_names": ["a", "b"]}, "2 names of actions do not fit"),
        ({"id": "FrozenLake-v1", "arguments": {"size": 3}}, "size"),
        ({"id": "FrozenLake-v1", "max_turns": 0}, "max_turns must be positive"),
        (
            {"id": "CartPole-v1", "shown": "render"},
            "cannot render in mode 'ansi', only in .'human'",
        ),
        ({"id": "FrozenLake-v1", "test_tasks": -1}, "test_tasks is -1"),
        ({"id": "FrozenLake-v1", "shwn": "render"}, "did you mean 'shown'"),
        ({}, "id"),
    ],
)
def test_wrong_options_are_told_before_a_run_begins(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        factory(**options)


def test_an_actor_runs_it_in_a_thread_of_its_own():
    async def scenario():
        made = factory(**LAKE)
        env = make_env(made.make)
        await env.reset(made.tasks("train")[0], 0)
        assert (await env.step(Action(text="down"))).info == {"invalid": 0.0}
        await env.close()

    asyncio.run(scenario())


def test_one_that_a_module_registers_is_found(tmp_path, monkeypatch):
    (tmp_path / "riddles_for_tests.py").write_text(
        "import gymnasium\n"
        "from gymnasium import spaces\n"
        "class Riddle(gymnasium.Env):\n"
        "    observation_space = spaces.Text(50, charset='What has keys and opens no door YesN')\n"
        "    action_space = spaces.Text(50)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n"
        "        return 'What has keys and opens no door', {}\n"
        "    def step(self, action):\n"
        "        right = 'piano' in action\n"
        "        return 'Yes' if right else 'No', float(right), right, False, {}\n"
        "gymnasium.register('Riddle-v0', Riddle, max_episode_steps=5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    _, [wrong, right] = played(factory(id="riddles_for_tests:Riddle-v0"), "a jailer", "a piano")
    assert (wrong.outcome, right.outcome) == (0.0, 1.0)
    assert right.observation.messages[0].content == "Yes"
    gymnasium.registry.pop("Riddle-v0")
