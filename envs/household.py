"""The embedded default environment: "put X in Y" in a procedural household, played in text.

One user message per turn, appended to the dialogue; the assistant's text is the command. Reward 1
when the object is where it belongs, which ends the game; the turn limit truncates it.
"""

import random
from collections.abc import Sequence

from msgspec import Struct

from capo.envs.api import Action, Message, Observation, Options, Split, Transition
from capo.envs.household_expert import Expert, most_turns, random_command
from capo.envs.household_layout import (
    CONTAINERS,
    OBJECTS,
    SURFACES,
    decode,
    digest,
    draw_layout,
    encode,
    split_of,
)
from capo.envs.household_rules import INVALID, World, words
from capo.envs.registry import read_options
from capo.protocol.errors import ConfigError, EnvError
from capo.protocol.records import Task

MAX_DRAWS_PER_GAME = 1000  # a world that has fewer layouts than games asked for ends here


class HouseholdOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`places`, `containers` and `objects` are numbers per game; containers count as places."""

    seed: int = 0  # of the games, not of the run: held-out games stay the same for every run
    places: int = 3
    containers: int = 1
    objects: int = 3
    max_turns: int = 8
    noise: float = 0.3  # share of random commands in demonstrations
    train_games: int = 10_000
    valid_games: int = 500
    test_games: int = 500


class HouseholdEnv:
    """One game at a time."""

    def __init__(self, max_turns: int) -> None:
        self.max_turns = max_turns
        self.world: World | None = None
        self.turns = 0

    async def reset(self, task: Task, seed: int) -> Observation:
        """The rules have no chance in them, so `seed` changes nothing."""
        self.world = World(decode(task.payload))
        self.turns = 0
        return observe(self.world, self.world.goal())

    async def step(self, action: Action) -> Transition:
        world = self.world
        if world is None:
            raise EnvError("the household game is over or was never reset; call reset first")
        answer = world.apply(action.text)
        self.turns += 1
        solved = world.solved
        truncated = not solved and self.turns >= self.max_turns
        if solved or truncated:
            self.world = None
        return Transition(
            observation=observe(world, answer),
            reward=float(solved),
            terminated=solved,
            truncated=truncated,
            outcome=float(solved),
            info={"invalid": float(answer == INVALID)},
        )

    async def close(self) -> None:
        self.world = None


class HouseholdFactory:
    """Implements EnvFactory, Demonstrator and Vocabulary."""

    def __init__(self, options: HouseholdOptions) -> None:
        self.options = options
        self._games: dict[Split, tuple[Task, ...]] = {}  # drawn once: it takes a moment

    def tasks(self, split: Split) -> Sequence[Task]:
        """Distinct games of one split, in an order given by the options' seed.

        Raises ConfigError if the world has too few layouts for that many games.
        """
        if split not in self._games:
            self._games[split] = _draw_games(split, self.options)
        return self._games[split]

    def make(self) -> HouseholdEnv:
        return HouseholdEnv(self.options.max_turns)

    def demonstrate(self, task: Task, seed: int) -> list[tuple[Observation, str]]:
        """One game by the expert, with the share `noise` of its commands made random."""
        rng = random.Random(f"demonstrate/{seed}/{task.id}")
        world = World(decode(task.payload))
        expert = Expert(world)
        observation = observe(world, world.goal())
        pairs: list[tuple[Observation, str]] = []
        while not world.solved and len(pairs) < self.options.max_turns:
            noisy = rng.random() < self.options.noise
            command = random_command(world.layout, rng) if noisy else expert.command()
            pairs.append((observation, command))
            observation = observe(world, world.apply(command))
            expert.look()
        return pairs

    def words(self) -> tuple[str, ...]:
        return words()


def make(options: Options) -> HouseholdFactory:
    """The factory maker that `environment.factory = "capo.envs.household:make"` names."""
    checked = read_options(options, HouseholdOptions)
    _check(checked)
    return HouseholdFactory(checked)


def observe(world: World, text: str) -> Observation:
    return Observation(messages=(Message("user", text),), state_key=world.state_key)


def _draw_games(split: Split, options: HouseholdOptions) -> tuple[Task, ...]:
    """Game i is the first layout of stream i that belongs to the split and was not drawn before."""
    count = {
        "train": options.train_games,
        "valid": options.valid_games,
        "test": options.test_games,
    }[split]
    games: dict[str, Task] = {}
    for index in range(count):
        rng = random.Random(f"household/{options.seed}/{split}/{index}")
        for _ in range(MAX_DRAWS_PER_GAME):
            layout = draw_layout(
                rng,
                num_places=options.places,
                num_containers=options.containers,
                num_objects=options.objects,
            )
            payload = encode(layout)
            name = digest(payload)
            if split_of(name) == split and name not in games:
                games[name] = Task(f"household-{name}", payload)
                break
        else:
            raise ConfigError(
                f"environment.options.{split}_games is {count}, but this world has too few"
                f" layouts: only {index} were found; ask for fewer or raise places or objects"
            )
    return tuple(games.values())


def _check(options: HouseholdOptions) -> None:
    """Refuses worlds that cannot be drawn or won."""
    limits = {
        "containers": (0, min(len(CONTAINERS), options.places)),
        "places": (2, len(SURFACES) + options.containers),
        "objects": (1, len(OBJECTS)),
        "noise": (0, 1),
        "train_games": (0, 10**7),
        "valid_games": (0, 10**7),
        "test_games": (0, 10**7),
        "max_turns": (most_turns(options.places, options.containers), 10**4),
    }
    for key, (low, high) in limits.items():
        value = getattr(options, key)
        if not low <= value <= high:
            raise ConfigError(
                f"environment.options.{key} is {value}; it must lie between {low} and {high}"
                " in this world"
            )
