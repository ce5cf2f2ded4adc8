"""The grounded goal against the definition of its truth: try every choice of every variable."""

import itertools
import random

import pytest

from capo.envs.alfworld.goal import ground_goal, is_reached
from capo.envs.alfworld.problem import Atom, Expression, Problem, read_problem, read_typed
from capo.protocol.errors import EnvError
from tests.envs.small_house import HOT_APPLE_IN_FRIDGE, MUG_UNDER_LAMP, TWO_MUGS_ON_SHELF, problem

FLUENTS = frozenset(("atlocation", "inreceptacle", "holds", "istoggled", "ishot"))


def holds(goal: Expression, facts: set[Atom], objects: dict[str, str]) -> bool:
    match goal:
        case ["and", *parts]:
            return all(holds(part, facts, objects) for part in parts)
        case ["not", part]:
            return not holds(part, facts, objects)
        case ["=", left, right]:
            return left == right
        case ["exists", [*variables], body]:
            typed = read_typed(variables)
            domains = [[o for o, kind in objects.items() if kind == t] for t in typed.values()]
            return any(
                holds(substitute(body, dict(zip(typed, values, strict=True))), facts, objects)
                for values in itertools.product(*domains)
            )
    return tuple(goal) in facts


def substitute(expression: Expression, values: dict[str, str]) -> Expression:
    if isinstance(expression, str):
        return values.get(expression, expression)
    return [substitute(part, values) for part in expression]


def random_facts(read: Problem, rng: random.Random) -> set[Atom]:
    """The unchanging facts, and each conceivable fluent with probability a half."""
    of_type = {
        kind: [name for name, found in read.objects.items() if found == kind]
        for kind in read.objects.values()
    }
    conceivable = [("atlocation", "agent1", place) for place in of_type["location"]] + [
        fact
        for thing in of_type["object"]
        for fact in [
            ("ishot", thing),
            ("istoggled", thing),
            ("holds", "agent1", thing),
            *(("inreceptacle", thing, receptacle) for receptacle in of_type["receptacle"]),
        ]
    ]
    static = {
        (predicate, *arguments)
        for predicate, found in read.facts.items()
        if predicate not in FLUENTS
        for arguments in found
    }
    return static | {fact for fact in conceivable if rng.random() < 0.5}


@pytest.mark.parametrize("goal", [HOT_APPLE_IN_FRIDGE, TWO_MUGS_ON_SHELF, MUG_UNDER_LAMP])
def test_a_goal_is_reached_exactly_when_some_choice_of_objects_satisfies_it(goal: str) -> None:
    read = read_problem(problem(goal))
    grounded = ground_goal(read, FLUENTS)
    rng = random.Random(goal)
    verdicts = []
    for _ in range(300):
        facts = random_facts(read, rng)
        verdicts.append(is_reached(grounded, facts))
        assert verdicts[-1] == holds(read.goal, facts, read.objects)
    assert 30 < sum(verdicts) < 270  # both verdicts were put to the test


def test_two_objects_means_two_different_objects() -> None:
    grounded = ground_goal(read_problem(problem(TWO_MUGS_ON_SHELF)), FLUENTS)
    one = {("inreceptacle", "mug_bar_1", "shelf_bar_1")}
    assert not is_reached(grounded, one)
    assert is_reached(grounded, one | {("inreceptacle", "mug_bar_2", "shelf_bar_1")})


def test_a_goal_that_no_object_can_satisfy_is_never_reached() -> None:
    text = problem("(exists (?o - object) (and (objectType ?o CarType) (isHot ?o)))")
    assert not is_reached(ground_goal(read_problem(text), FLUENTS), {("ishot", "apple_bar_1")})


@pytest.mark.parametrize(
    ("goal", "said"),
    [
        ("(or (isHot Apple_bar_1) (isHot Mug_bar_1))", "'or'"),
        ("(forall (?o - object) (isHot ?o))", "'forall'"),
        ("(not (isHot Apple_bar_1))", "'not'"),
        ("(exists (?o - object) (exists (?o - object) (isHot ?o)))", "quantifies \\?o twice"),
    ],
)
def test_a_goal_of_another_form_is_refused(goal: str, said: str) -> None:
    with pytest.raises(EnvError, match=said):
        ground_goal(read_problem(problem(goal)), FLUENTS)
