import re

import pytest

from capo.envs.household_layout import Layout
from capo.envs.household_rules import INVALID, World, words

LAYOUT = Layout(
    places=("table", "cabinet", "shelf"),
    objects=("apple", "cup", "pen"),
    at=(1, 0, 0),
    goal_object=0,
    goal_place=2,
)


def play(*commands, layout=LAYOUT):
    world = World(layout)
    return world, [world.apply(command) for command in commands]


def test_a_whole_game_reads_as_it_should():
    world, answers = play(
        "go to cabinet", "open cabinet", "take apple", "go to shelf", "put apple on shelf"
    )
    assert world.goal() == "Put the apple on the shelf. Places: table, cabinet, shelf."
    assert answers == [
        "The cabinet is closed.",
        "In the cabinet: apple.",
        "You hold the apple.",
        "On the shelf: nothing.",
        "The apple is on the shelf.",
    ]
    assert world.solved


def test_contents_are_listed_in_the_layouts_order():
    _, answers = play("go to table")
    assert answers == ["On the table: cup, pen."]


@pytest.mark.parametrize(
    "commands",
    [
        ["take cup"],  # before going anywhere
        ["go to moon"],
        ["go to apple"],
        ["go to table", "go to table"],
        ["open cabinet"],  # out of reach
        ["go to table", "open table"],
        ["go to cabinet", "open cabinet", "open cabinet"],
        ["go to cabinet", "take apple"],  # closed
        ["go to table", "take apple"],  # elsewhere
        ["go to table", "take cup", "take pen"],  # one pair of hands
        ["go to table", "put cup on table"],  # not held
        ["go to table", "take cup", "put cup in table"],
        ["go to table", "take cup", "put cup on shelf"],  # out of reach
        ["go to table", "take cup", "go to cabinet", "put cup in cabinet"],  # closed
        ["go to table", "take cup", "put pen on table"],
        [""],
        ["Go to table"],
        ["go to table now"],
        ["take"],
    ],
)
def test_a_command_that_cannot_be_done_changes_nothing(commands):
    world, _ = play(*commands[:-1])
    before = world.state_key
    assert world.apply(commands[-1]) == INVALID
    assert world.state_key == before


def test_extra_spaces_do_not_matter():
    _, answers = play("  go  to table ")
    assert answers == ["On the table: cup, pen."]


def test_what_was_put_down_can_be_taken_again():
    world, answers = play("go to table", "take cup", "put cup on table", "take cup")
    assert answers[-1] == "You hold the cup."
    assert world.held == 1


def test_a_container_stays_open():
    _, answers = play("go to cabinet", "open cabinet", "go to table", "go to cabinet")
    assert answers[-1] == "In the cabinet: apple."


def test_state_keys_are_equal_for_equal_states_only():
    key = {name: play(*commands)[0].state_key for name, commands in {
        "start": [],
        "table": ["go to table"],
        "table again": ["go to shelf", "go to table"],
        "opened": ["go to cabinet", "open cabinet", "go to table"],
        "holding": ["go to table", "take cup"],
    }.items()}  # fmt: skip
    assert key["table"] == key["table again"]
    assert len(set(key.values())) == 4


def test_state_keys_of_two_layouts_differ():
    other = Layout(LAYOUT.places, LAYOUT.objects, (1, 0, 1), 0, 2)
    assert World(LAYOUT).state_key != World(other).state_key


def test_the_words_have_no_gaps_between_them():
    assert all(re.fullmatch(r"\w+|[^\w\s]", word) for word in words())
    assert list(words()) == sorted(set(words()))
