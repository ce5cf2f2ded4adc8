"""Spaces as text, and back: an agent's words become an action of the space, or a sentence."""

import hypothesis.strategies as st
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings

from capo.envs.space_text import describe, read_action, show, show_rendered

GRID = spaces.Discrete(4)
NAMES = ("left", "down", "right", "up")
SHIFTED = spaces.Discrete(3, start=-1)
BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
MANY = spaces.MultiDiscrete([3, 2])
NESTED = spaces.Dict({"arm": spaces.Tuple([GRID, BOX]), "say": spaces.Text(20)})


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ("A dark room.", "A dark room."),
        (7, "7"),
        (np.int64(7), "7"),
        (np.array([0.123456, -1.0], np.float32), "[0.1235, -1.0]"),
        ((1, True, 0.5), "[1, true, 0.5]"),
        ({"room": "cellar", "exits": np.array([1, 0])}, "room: cellar\nexits: [1, 0]"),
        ([{"a": np.float32(0.5)}], '[{"a": 0.5}]'),
    ],
)
def test_an_observation_is_shown_as_text(observation, text):
    assert show(observation) == text


def test_colours_of_a_rendering_become_brackets():
    assert show_rendered("  (Up)\nS\x1b[41mF\x1b[0mG\n") == "  (Up)\nS[F]G"


def test_names_of_actions_are_read_whatever_their_case_and_in_tags():
    assert read_action(GRID, " Right\n", NAMES) == 2
    assert read_action(GRID, "I go on.\n<action>up</action>", NAMES) == 3
    assert read_action(GRID, "<action>up</action> no: <action>left</action>", NAMES) == 0
    assert read_action(SHIFTED, "b", ("a", "b", "c")) == 0


@pytest.mark.parametrize(
    "text", ["<think>Not 1.</think>\n3", "<think><action>1</action></think>3", "Hm.</think>3"]
)
def test_what_an_agent_thinks_is_not_what_it_does(text):
    assert read_action(GRID, text) == 3


@pytest.mark.parametrize("space", [GRID, spaces.Text(100)])
def test_a_thought_that_was_cut_off_is_no_action(space):
    with pytest.raises(ValueError, match="never finished"):
        read_action(space, "<think>perhaps <action>1</action>")


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (GRID, "3", 3),
        (SHIFTED, "-1", -1),
        (MANY, "[2, 1]", np.array([2, 1])),
        (BOX, "[0.5, -1]", np.array([0.5, -1.0], np.float32)),
        (spaces.Text(20), "open the door", "open the door"),
    ],
)
def test_actions_are_read_as_json_or_text(space, text, action):
    read = read_action(space, text)
    assert np.array_equal(read, action)
    assert isinstance(space, spaces.Text) or space.contains(read)


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (GRID, "4"),
        (GRID, "-1"),
        (GRID, "1.5"),
        (GRID, "true"),
        (GRID, '"1"'),
        (GRID, "null"),
        (GRID, "[1]"),
        (GRID, "9" * 5000),
        (GRID, ""),
        (MANY, "[1]"),
        (MANY, "[[1, 0]]"),
        (MANY, "[1, [0]]"),
        (BOX, "[2, 0]"),
        (BOX, "[NaN, 0]"),
        (BOX, "[1e999, 0]"),
        (BOX, '{"a": 1}'),
        (NESTED, '{"arm": [1, [0, 0]]}'),
        (NESTED, '{"arm": [1], "say": "x"}'),
        (NESTED, '{"arm": [1, [0, 0]], "say": 3}'),
        (NESTED, "[" * 100_000),
        (spaces.Text(3), "too long"),
    ],
)
def test_what_is_no_action_gives_a_sentence_for_the_agent(space, text):
    with pytest.raises(ValueError, match=r"(is not|cannot be).*\.$") as caught:
        read_action(space, text)
    assert len(str(caught.value)) < 150


@given(st.text(max_size=40))
@settings(max_examples=500)
def test_any_text_is_an_action_of_its_space_or_refused(text):
    for space in (GRID, SHIFTED, MANY, BOX, NESTED):
        try:
            action = read_action(space, text)
        except ValueError:
            continue
        if isinstance(space, spaces.Dict):  # with a text, of whatever letters
            action = {**action, "say": "x"}
        assert space.contains(action)


def test_nested_actions_are_built_inside_out():
    action = read_action(NESTED, '{"say": "hi", "arm": [2, [0.5, 0]]}')
    assert action["say"] == "hi"
    assert action["arm"][0] == 2
    assert NESTED.contains(action)


def test_an_agent_is_told_what_an_action_is():
    assert describe(GRID, NAMES) == "Answer with exactly one of: left, down, right, up."
    assert describe(SHIFTED) == "Answer with one whole number from -1 to 1."
    assert "Box" in describe(BOX)
    assert describe(spaces.Text(5)) == "Answer with a text."


@pytest.mark.parametrize(
    ("space", "names"), [(GRID, ("a", "b")), (BOX, ("a", "b")), (GRID, ("a", "A", "b", "c"))]
)
def test_names_that_do_not_fit_are_refused(space, names):
    with pytest.raises(ValueError, match="names of actions"):
        describe(space, names)


@pytest.mark.parametrize(
    "inner",
    [
        spaces.Sequence(GRID),
        spaces.Graph(GRID, None),
        spaces.OneOf([GRID, BOX]),
    ],
)
def test_a_space_that_no_answer_can_be_of_is_refused(inner):
    for space in (inner, spaces.Dict({"a": spaces.Tuple([GRID, inner])})):
        with pytest.raises(ValueError, match="no answer can be an action of"):
            describe(space)
    assert "Dict" in describe(NESTED)
