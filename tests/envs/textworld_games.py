"""The real games and the real TextWorld, for the tests that compare with them."""

import json
import lzma
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

DATA = Path(__file__).parents[3] / "shared" / "data" / "alfworld"


def data() -> Path:
    """The folder of the real games, or the test is skipped: they do not come with the project."""
    if not DATA.is_dir():
        pytest.skip(f"the real games are not in {DATA}")
    return DATA


class RealGame(NamedTuple):
    id: str
    task: str
    problem: str
    walkthrough: tuple[str, ...]

    @property
    def family(self) -> str:
        return self.id.split("-")[0]


class Shown(NamedTuple):
    """What a player is told after a command."""

    text: str
    commands: tuple[str, ...]
    score: float
    done: bool


def read_games(split: str) -> Iterator[RealGame]:
    with lzma.open(data() / f"{split}.jsonl.xz", "rt", encoding="utf-8") as lines:
        for line in lines:
            game = json.loads(line)
            yield RealGame(
                game["id"], game["task"], game["pddl_problem"], tuple(game["walkthrough"])
            )


@cache
def valid_seen() -> tuple[RealGame, ...]:
    return tuple(read_games("valid_seen"))


@cache
def train() -> tuple[RealGame, ...]:
    return tuple(read_games("train"))


def some_of_each_family(games: Sequence[RealGame], number: int) -> list[RealGame]:
    """`number` games of every family, spread over the houses."""
    families: dict[str, list[RealGame]] = {}
    for game in games:
        families.setdefault(game.family, []).append(game)
    return [
        of_family[index * len(of_family) // number]
        for of_family in families.values()
        for index in range(number)
    ]


def game_file(game: RealGame) -> dict[str, object]:
    """The contents of a `game.tw-pddl`, as ALFWorld publishes it."""
    grammar = (data() / "grammar.twl2").read_text(encoding="utf-8")
    return {
        "pddl_domain": (data() / "alfred.pddl").read_text(encoding="utf-8"),
        "grammar": grammar.replace("@@TASK@@", game.task),
        "pddl_problem": game.problem,
        "walkthrough": list(game.walkthrough),
        "solvable": True,
    }


class TextWorldGame:
    """One game in TextWorld's own engine, with the names that ALFWorld gives to things."""

    def __init__(self, game: RealGame) -> None:
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld import EnvInfos
        from textworld.envs.pddl import PddlEnv

        arguments = sys.argv  # the planner's translator replaces them
        self._env = AlfredDemangler(PddlEnv(EnvInfos(won=True, admissible_commands=True)))
        self._env.load(game_file(game))
        sys.argv = arguments

    def reset(self) -> Shown:
        arguments = sys.argv
        state = self._env.reset()
        sys.argv = arguments
        return Shown(state.feedback, tuple(state["admissible_commands"]), 0, state["won"])

    def step(self, command: str) -> Shown:
        state, score, done = self._env.step(command)
        return Shown(state.feedback, tuple(state["admissible_commands"]), score, done)
