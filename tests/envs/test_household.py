import asyncio
import os
import re
import subprocess
import sys

import pytest

from capo.envs.api import Action
from capo.envs.household import make
from capo.envs.household_layout import split_of
from capo.protocol.errors import ConfigError, EnvError

SMALL = {"train_games": 2000, "valid_games": 300, "test_games": 300}


def act(env, text):
    return asyncio.run(env.step(Action(text=text)))


async def play(env, task, commands):
    """All transitions of one game."""
    await env.reset(task, seed=0)
    return [await env.step(Action(text=command)) for command in commands]


def start(factory, index=0):
    task = factory.tasks("train")[index]
    env = factory.make()
    return task, env, asyncio.run(env.reset(task, seed=0))


async def play_as_shown(factory, tasks):
    games = []
    for task in tasks:
        commands = [command for _, command in factory.demonstrate(task, seed=1)]
        games.append(await play(factory.make(), task, commands))
    return games


@pytest.mark.parametrize(
    "sizes", [{}, {"places": 4, "containers": 2, "max_turns": 8}, {"containers": 0}]
)
def test_the_expert_wins_every_game_within_the_turn_limit(sizes):
    factory = make({**SMALL, "noise": 0.0, **sizes})
    for *before, last in asyncio.run(play_as_shown(factory, factory.tasks("train"))):
        assert last.terminated
        assert not last.truncated
        assert last.reward == last.outcome == 1.0
        assert not any(one.terminated or one.truncated or one.reward for one in before)
        assert not any(one.info["invalid"] for one in (*before, last))


def test_a_demonstration_shows_what_the_environment_says():
    factory = make({**SMALL, "noise": 0.5})
    for index in range(200):
        task, env, observation = start(factory, index)
        for shown, command in factory.demonstrate(task, seed=3):
            assert shown == observation
            observation = act(env, command).observation


def test_noise_is_the_share_of_games_that_stray_from_the_expert():
    def commands(noise, seed):
        factory = make({**SMALL, "noise": noise})
        return [
            [command for _, command in factory.demonstrate(task, seed)]
            for task in factory.tasks("train")[:200]
        ]

    assert commands(0.0, 1) == commands(0.0, 2)
    assert commands(0.3, 1) == commands(0.3, 1)
    assert commands(0.3, 1) != commands(0.3, 2)
    strayed = [
        sum(a != b for a, b in zip(commands(noise, 1), commands(0.0, 1), strict=True))
        for noise in (0.05, 0.3, 1.0)
    ]
    assert strayed == sorted(strayed)
    assert strayed[0] < 100 < strayed[2]


def test_the_turn_limit_truncates_without_reward():
    _, env, _ = start(make({**SMALL, "max_turns": 6}))
    transitions = [act(env, "sing a song") for _ in range(6)]
    assert [one.truncated for one in transitions] == [False] * 5 + [True]
    assert not any(one.terminated or one.reward or one.outcome for one in transitions)
    assert [one.info["invalid"] for one in transitions] == [1.0] * 6
    assert transitions[0].observation.messages[0].content == "Nothing happens."


def test_a_win_on_the_last_turn_is_a_win():
    factory = make({**SMALL, "noise": 0.0})
    task = factory.tasks("train")[0]
    commands = [command for _, command in factory.demonstrate(task, seed=0)]
    wasted = ["wait"] * (8 - len(commands))
    *_, last = asyncio.run(play(factory.make(), task, [*wasted, *commands]))
    assert last.terminated
    assert not last.truncated


def test_dialogues_are_appended_to():
    _, env, first = start(make(SMALL))
    second = act(env, "wait").observation
    for observation in (first, second):
        assert not observation.rebuilt
        assert [message.role for message in observation.messages] == ["user"]
    assert first.state_key == second.state_key != ""


def test_a_finished_game_must_be_reset():
    factory = make({**SMALL, "max_turns": 6})
    with pytest.raises(EnvError, match="call reset first"):
        act(factory.make(), "go to table")
    task, env, first = start(factory)
    for _ in range(6):
        act(env, "wait")
    with pytest.raises(EnvError, match="call reset first"):
        act(env, "wait")
    assert asyncio.run(env.reset(task, seed=9)) == first


def test_splits_are_disjoint_by_digest_and_free_of_repeats():
    factory = make({"train_games": 8000, "valid_games": 1000, "test_games": 1000})
    digests = {
        split: [task.id.removeprefix("household-") for task in factory.tasks(split)]
        for split in ("train", "valid", "test")
    }
    everything = [digest for names in digests.values() for digest in names]
    assert len(everything) == len(set(everything)) == 10_000
    for split, names in digests.items():
        assert {split_of(name) for name in names} == {split}


def test_longer_lists_start_with_the_shorter_ones():
    short = make({**SMALL, "train_games": 50}).tasks("train")
    assert tuple(short) == tuple(make(SMALL).tasks("train")[:50])


def test_the_seed_of_the_options_changes_the_games():
    one, other = (make({**SMALL, "seed": seed}).tasks("valid") for seed in (0, 1))
    assert {task.id for task in one}.isdisjoint(task.id for task in other)


def test_every_word_shown_or_said_is_in_the_vocabulary():
    factory = make({**SMALL, "noise": 0.6, "places": 5, "containers": 2, "max_turns": 12})
    known = set(factory.words())
    for task in factory.tasks("train")[:500]:
        for observation, command in factory.demonstrate(task, seed=0):
            text = f"{observation.messages[0].content} {command}"
            assert set(re.findall(r"\w+|[^\w\s]", text)) <= known


FINGERPRINT = """
import hashlib
from capo.envs.household import make
factory = make({"train_games": 300, "valid_games": 50, "test_games": 50})
seen = hashlib.sha256(repr(factory.words()).encode())
for split in ("train", "valid", "test"):
    for task in factory.tasks(split):
        seen.update(repr((task, factory.demonstrate(task, seed=5))).encode())
print(seen.hexdigest())
"""


def test_games_and_demonstrations_do_not_depend_on_the_hash_seed():
    prints = {
        subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("0", "1", "4242")
    }
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plces": 3}, "did you mean 'places'"),
        ({"places": 1}, r"places is 1; it must lie between 2"),
        ({"containers": 4}, r"containers is 4; it must lie between 0 and 3"),
        ({"objects": 99}, r"objects is 99; it must lie between 1 and 8"),
        ({"max_turns": 5}, r"max_turns is 5; it must lie between 6"),
        ({"noise": 1.5}, r"noise is 1.5; it must lie between 0 and 1"),
        ({"train_games": -1}, r"train_games is -1"),
        ({"seed": 0.5}, r"Expected `int`, got `float`"),
    ],
)
def test_options_that_cannot_be_played_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make(options)


def test_more_games_than_layouts_are_refused_instead_of_searched_for_forever():
    tiny = {"places": 2, "containers": 0, "objects": 1, "test_games": 2000}
    with pytest.raises(ConfigError, match="test_games is 2000, but this world has too few layouts"):
        make(tiny).tasks("test")
