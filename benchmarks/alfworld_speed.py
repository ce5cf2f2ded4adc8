"""Steps per second and core: our ALFWorld engine and TextWorld's, on the same games, in one run.

A step is a random admissible command, its text, the new admissible commands and whether the game is
won. Loading a game is timed apart. The clock is the process's own time on the processor. TextWorld
comes with `pip install '.[textworld]'`; without it only our engine is timed.

python -m benchmarks.alfworld_speed --data FOLDER [--split valid_seen] [--games 6]
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from importlib import resources
from typing import NamedTuple

from capo.envs.alfworld.games import Game, data_folder, read_games
from capo.envs.alfworld.world import World
from capo.protocol.errors import CapoError

Step = Callable[[str], Sequence[str]]  # a command -> the commands that are then admissible
Loader = Callable[[Game], tuple[Sequence[str], Step]]


class Speed(NamedTuple):
    steps_per_s: float
    load_ms: float


def load_ours(game: Game) -> tuple[Sequence[str], Step]:
    world = World(game.problem, game.task)

    def step(command: str) -> Sequence[str]:
        world.step(command)
        # Reading them makes them part of the step, whenever the engine works them out.
        return world.commands if not world.won else ()

    return world.commands, step


def textworld_loader() -> Loader:
    """Plays with the rules and texts that ALFWorld's package brings along."""
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld import EnvInfos
    from textworld.envs.pddl import PddlEnv

    data = resources.files("alfworld") / "data"
    domain = (data / "alfred.pddl").read_text(encoding="utf-8")
    grammar = (data / "alfred.twl2").read_text(encoding="utf-8")

    def load(game: Game) -> tuple[Sequence[str], Step]:
        env = AlfredDemangler(PddlEnv(EnvInfos(won=True, admissible_commands=True)))
        env.load(
            {
                "pddl_domain": domain,
                "grammar": grammar.replace("UNKNOWN GOAL.", game.task),
                "pddl_problem": game.problem,
            }
        )

        def step(command: str) -> Sequence[str]:
            state, _, done = env.step(command)
            return state["admissible_commands"] if not done else ()

        return env.reset()["admissible_commands"], step

    return load


def measure(load: Loader, games: Sequence[Game], steps: int, seed: int) -> Speed:
    """Random play of `steps` steps in every game, or to its end."""
    rng = random.Random(seed)
    taken, load_s, step_s = 0, 0.0, 0.0
    for game in games:
        start = time.process_time()
        commands, step = load(game)
        loaded = time.process_time()
        for _ in range(steps):
            commands = step(rng.choice(commands))
            taken += 1
            if not commands:
                break
        load_s += loaded - start
        step_s += time.process_time() - loaded
    return Speed(taken / step_s, 1000 * load_s / len(games))


def show(name: str, speed: Speed) -> None:
    print(f"{name:<10} {speed.steps_per_s:>10,.0f} steps/s {speed.load_ms:>10,.1f} ms a load")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--data", default="", help="folder of the games; $ALFWORLD_DATA if not given"
    )
    parser.add_argument("--split", default="valid_seen")
    parser.add_argument("--games", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1000, help="a game, in our engine")
    parser.add_argument("--textworld-steps", type=int, default=30, help="a game, in TextWorld")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    games = read_games(data_folder(arguments.data), arguments.split)[: arguments.games]
    ours = measure(load_ours, games, arguments.steps, arguments.seed)
    show("capo", ours)
    try:
        load_theirs = textworld_loader()
    except ImportError:
        print("TextWorld is not installed; pip install '.[textworld]' to compare with it")
        return
    theirs = measure(load_theirs, games, arguments.textworld_steps, arguments.seed)
    show("textworld", theirs)
    print(
        f"{'ratio':<10} {ours.steps_per_s / theirs.steps_per_s:>10,.0f} x "
        f"{theirs.load_ms / ours.load_ms:>16,.0f} x"
    )


if __name__ == "__main__":
    try:
        main()
    except CapoError as error:
        raise SystemExit(str(error)) from error
