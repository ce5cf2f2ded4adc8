"""Reading PDDL problems: what is read, and what is said about broken ones."""

import pytest

from capo.envs.alfworld.problem import read_problem
from capo.protocol.errors import EnvError


def problem(objects: str = "a - agent", init: str = "", goal: str = "(x)") -> str:
    return f"(define (problem p) (:domain d) (:objects {objects}) (:init {init}) (:goal {goal}))"


def test_objects_facts_and_goal_are_read_in_lower_case() -> None:
    read = read_problem(
        problem("A B - Thing c - place", "(On A B) (On B c) ; (On C a)\n(free)", "(and (on a b))")
    )
    assert read.objects == {"a": "thing", "b": "thing", "c": "place"}
    assert read.facts == {"on": (("a", "b"), ("b", "c")), "free": ((),)}
    assert read.goal == ["and", ["on", "a", "b"]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not one parenthesised"),
        ("(define (:objects) (:init)", "1 parentheses still open"),
        ("(define))", "never opened"),
        ("(define (problem p) (:objects) (:goal (x)))", "no :init section"),
        (problem(objects="a b - thing c"), "'c' has no type"),
        (problem(objects="a -"), "ends where a type should follow"),
        (problem(objects="a (b) - thing"), r"\(b\) stands"),
        (problem(init="(on a (b c))"), r"\(on a \(b c\)\) stands"),
        (problem(init="(on a b) ()"), r"\(\) stands"),
        (problem(init="on"), "on stands"),
        (problem(goal="(x) (y)"), "has 2 expressions"),
        (problem(goal=""), "has 0 expressions"),
    ],
)
def test_a_broken_problem_is_refused_with_its_flaw(text: str, said: str) -> None:
    with pytest.raises(EnvError, match=said):
        read_problem(text)
