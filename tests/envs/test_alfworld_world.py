"""The rules of the household, one by one in a small house, and all of them in the real games."""

from collections.abc import Sequence

import pytest

from capo.envs.alfworld import text
from capo.envs.alfworld.world import World
from capo.protocol.errors import EnvError
from tests.envs import textworld_games
from tests.envs.small_house import MUG_UNDER_LAMP, TWO_MUGS_ON_SHELF, problem

GO = ["go to countertop 1", "go to fridge 1", "go to microwave 1", "go to shelf 1"]
ALWAYS = ["help", "inventory", "look"]


def play(world: World, commands: Sequence[str]) -> list[str]:
    """What is said to commands that are all admissible."""
    said = []
    for command in commands:
        assert command in world.commands
        said.append(world.step(command))
    return said


def small(*commands: str, goal: str = "", more_facts: str = "", without: str = "") -> World:
    pddl = problem(goal, more_facts, without) if goal else problem(more_facts=more_facts)
    world = World(pddl, "cook.")
    play(world, commands)
    return world


def test_the_introduction_lists_all_receptacles_and_the_task() -> None:
    assert small().introduction == (
        "-= Welcome to TextWorld, ALFRED! =-\n\n"
        "You are in the middle of a room. Looking quickly around you, you see a countertop 1, "
        "a fridge 1, a microwave 1, a shelf 1, and a sinkbasin 1.\n\nYour task is to: cook."
    )


def test_at_first_one_can_go_everywhere_and_look() -> None:
    assert list(small().commands) == sorted([*GO, "go to sinkbasin 1", *ALWAYS])
    assert play(small(), ["look", "inventory"]) == [
        "You are in the middle of a room. Looking quickly around you, you see nothing.",
        "You are not carrying anything.",
    ]


def test_help_is_a_table() -> None:
    assert (
        small()
        .step("help")
        .startswith("Available commands:\n  look:                             look around your")
    )


def test_one_cannot_go_where_one_is() -> None:
    commands = small("go to shelf 1").commands
    assert "go to shelf 1" not in commands
    assert "go to countertop 1" not in commands  # at the same place


def test_a_closed_receptacle_hides_and_keeps_what_is_in_it() -> None:
    world = small()
    assert play(world, ["go to fridge 1"]) == ["You arrive at fridge 1. The fridge 1 is closed."]
    assert "take apple 1 from fridge 1" not in world.commands
    assert play(world, ["open fridge 1"]) == [
        "You open the fridge 1. The fridge 1 is open. In it, you see a apple 1."
    ]
    assert "take apple 1 from fridge 1" in world.commands
    assert "open fridge 1" not in world.commands
    assert play(world, ["close fridge 1", "examine fridge 1"]) == [
        "You close the fridge 1.",
        "The fridge 1 is closed.",
    ]


def test_hands_hold_one_thing() -> None:
    world = small("go to countertop 1")
    assert play(world, ["take mug 2 from countertop 1", "inventory", "examine countertop 1"]) == [
        "You pick up the mug 2 from the countertop 1.",
        "You are carrying: a mug 2.",
        "On the countertop 1, you see a knife 1.",
    ]
    assert not any(command.startswith("take") for command in world.commands)


def test_things_go_only_where_their_kind_belongs() -> None:
    world = small("go to countertop 1", "take knife 1 from countertop 1")
    moves = [command for command in world.commands if command.startswith("move")]
    assert moves == ["move knife 1 to countertop 1"]
    assert play(world, moves) == ["You move the knife 1 to the countertop 1."]


def test_what_was_moved_to_a_neighbouring_receptacle_is_seen_beside_both() -> None:
    world = small("go to countertop 1")
    assert world.step("look") == (
        "You are facing the countertop 1, and shelf 1. Next to it, you see nothing."
    )
    play(world, ["take mug 2 from countertop 1", "move mug 2 to shelf 1"])
    assert world.step("look").endswith("Next to it, you see a mug 2.")
    assert (
        world.step("examine shelf 1")
        == "On the shelf 1, you see a desklamp 1, a mug 2, and a mug 1."
    )


def test_heat_cool_clean_and_slice_change_what_an_apple_is_like() -> None:
    world = small("go to fridge 1", "open fridge 1", "take apple 1 from fridge 1")
    assert world.step("examine apple 1") == "There's nothing special about apple 1."
    assert play(world, ["cool apple 1 with fridge 1", "examine apple 1"]) == [
        "You cool the apple 1 using the fridge 1.",
        "This is a cold apple 1.",
    ]
    play(world, ["go to microwave 1", "heat apple 1 with microwave 1"])
    assert world.step("examine apple 1") == "This is a hot apple 1."
    play(world, ["go to sinkbasin 1", "clean apple 1 with sinkbasin 1"])
    assert world.step("examine apple 1") == "This is a hot and clean apple 1."
    play(world, ["go to countertop 1", "move apple 1 to countertop 1"])
    play(world, ["take knife 1 from countertop 1"])
    assert play(world, ["slice apple 1 with knife 1"]) == [
        "You sliced the apple 1 with the knife 1."
    ]
    play(world, ["move knife 1 to countertop 1", "take apple 1 from countertop 1"])
    assert world.step("examine apple 1") == "This is a hot and clean sliced apple 1."


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ({"clean"}, "This is a clean pan 1."),
        ({"clean", "cool"}, "This is a cool and clean pan 1."),
        ({"clean", "cool", "sliced"}, "This is a cool and clean sliced pan 1."),
        ({"clean", "sliced"}, "This is a clean sliced pan 1."),
        ({"hot", "sliced"}, "This is a hot sliced pan 1."),
        ({"cool", "sliced"}, "This is a cool sliced pan 1."),
        ({"sliced"}, "This is a sliced pan 1."),
        ({"toggled"}, "This pan 1 is on."),
        ({"toggled", "hot"}, "This is a hot pan 1."),
    ],
)
def test_states_are_worded_as_in_the_game(states: set[str], said: str) -> None:
    assert text.condition("pan 1", states) == said


def test_an_object_that_holds_others_is_described_by_those() -> None:
    world = small("go to shelf 1", "take mug 1 from shelf 1")
    assert world.step("examine mug 1") == "This is a normal mug 1. In it, you see a pea 1."


def test_a_lamp_is_always_said_to_be_turned_on() -> None:
    world = small("go to shelf 1")
    assert play(world, ["use desklamp 1"] * 2) == ["You turn on the desklamp 1."] * 2


def test_an_object_in_two_receptacles_leaves_only_the_one_it_is_taken_from() -> None:
    world = small(
        "go to countertop 1",
        "take mug 2 from countertop 1",
        more_facts="(inReceptacle Mug_bar_1 Shelf_bar_1)",
    )
    assert (
        world.step("examine shelf 1")
        == "On the shelf 1, you see a desklamp 1, a mug 2, and a mug 1."
    )
    assert world.step("examine countertop 1") == "On the countertop 1, you see a knife 1."


def test_a_command_that_is_not_admissible_changes_nothing() -> None:
    world = small("go to fridge 1")
    key, commands = world.state_key, world.commands
    assert world.step("take apple 1 from fridge 1") == "Nothing happens."
    assert (world.state_key, world.commands) == (key, commands)


def test_the_state_key_tells_states_and_not_histories_apart() -> None:
    start = small().state_key
    world = small("go to fridge 1", "open fridge 1")
    assert len({start, small("go to fridge 1").state_key, world.state_key}) == 3
    assert world.state_key == small("go to shelf 1", "go to fridge 1", "open fridge 1").state_key
    taken_and_back = ["take apple 1 from fridge 1", "move apple 1 to fridge 1"]
    play(world, [*taken_and_back, "inventory", "look"])
    assert world.state_key == small("go to fridge 1", "open fridge 1").state_key


@pytest.mark.parametrize(
    ("goal", "commands"),
    [
        (
            "",
            [
                "go to fridge 1",
                "open fridge 1",
                "take apple 1 from fridge 1",
                "go to microwave 1",
                "heat apple 1 with microwave 1",
                "go to fridge 1",
                "move apple 1 to fridge 1",
            ],
        ),
        (
            TWO_MUGS_ON_SHELF,
            ["go to shelf 1", "take mug 2 from countertop 1", "move mug 2 to shelf 1"],
        ),
        (MUG_UNDER_LAMP, ["go to shelf 1", "take mug 1 from shelf 1", "use desklamp 1"]),
    ],
)
def test_a_goal_is_won_by_its_last_step_and_not_before(goal: str, commands: list[str]) -> None:
    world = small(goal=goal)
    for command in commands:
        assert not world.won
        play(world, [command])
    assert world.won


@pytest.mark.parametrize(
    ("more_facts", "without", "said"),
    [
        ("(openable Shelf_bar_1 Fridge_bar_1)", "", "has 2 arguments, not 1"),
        ("", "(atLocation agent1 loc_door)", "exactly one agent"),
        ("(atLocation agent1 loc_sink)", "", "exactly one agent"),
    ],
)
def test_impossible_facts_are_refused(more_facts: str, without: str, said: str) -> None:
    with pytest.raises(EnvError, match=said):
        World(problem(more_facts=more_facts, without=without), "cook.")


@pytest.mark.parametrize(("split", "number"), [("valid_seen", 140), ("train", 3553)])
def test_every_walkthrough_of_the_real_games_wins_with_its_last_step(
    split: str, number: int
) -> None:
    played = 0
    for game in textworld_games.read_games(split):
        world = World(game.problem, game.task)
        *first, last = game.walkthrough
        play(world, first)
        assert not world.won, game.id
        play(world, [last])
        assert world.won, game.id
        played += 1
    assert played == number
