"""What never changes in a game: what things are called, where places are, what can be done to what.

Everything is looked up by the problem's own identifiers; names are only for the text.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from msgspec import Struct

from capo.envs.alfworld.goal import Goal, ground_goal
from capo.envs.alfworld.problem import Atom, Problem
from capo.protocol.errors import EnvError

# Predicates by their number of arguments. Those that are not here have no effect on a game.
_FLUENTS = {
    "atlocation": 2,
    "objectatlocation": 2,
    "inreceptacle": 2,
    "opened": 1,
    "holds": 2,
    "holdsany": 1,
    "isclean": 1,
    "ishot": 1,
    "iscool": 1,
    "ison": 1,
    "istoggled": 1,
    "issliced": 1,
}
_ABILITIES = {
    "openable": 1,
    "pickupable": 1,
    "toggleable": 1,
    "cleanable": 1,
    "heatable": 1,
    "coolable": 1,
    "sliceable": 1,
    "isreceptacleobject": 1,
}
_RELATIONS = {
    "objecttype": 2,
    "receptacletype": 2,
    "cancontain": 2,
    "receptacleatlocation": 2,
    "inreceptacleobject": 2,
}
CLEANERS = frozenset(("sinktype", "sinkbasintype"))
HEATERS = frozenset(("microwavetype",))
COOLERS = frozenset(("fridgetype",))
KNIVES = frozenset(("knifetype", "butterknifetype"))


class House(Struct, frozen=True):
    """One game's layout. Sequences are in the order in which the game lists things."""

    agent: str
    names: dict[str, str]
    receptacles: tuple[str, ...]
    places: dict[str, tuple[str, ...]]  # receptacle -> locations
    at_place: dict[str, tuple[str, ...]]  # location -> receptacles
    can: dict[str, frozenset[str]]  # ability, such as "openable" -> things that have it
    types: dict[str, frozenset[str]]  # thing -> its types
    accepts: frozenset[tuple[str, str]]  # receptacle, object that may be put there
    inner: dict[str, tuple[str, ...]]  # object that holds others -> those
    start: frozenset[Atom]  # the fluents that hold at the beginning
    goal: Goal


def build_house(problem: Problem) -> House:
    facts = problem.facts
    for predicate, number in (_FLUENTS | _ABILITIES | _RELATIONS).items():
        for arguments in facts.get(predicate, ()):
            if len(arguments) != number:
                raise EnvError(
                    f"({' '.join((predicate, *arguments))}) in the PDDL problem has "
                    f"{len(arguments)} arguments, not {number}"
                )
    agents = [name for name, kind in problem.objects.items() if kind == "agent"]
    if len(agents) != 1 or len(facts.get("atlocation", ())) != 1:
        raise EnvError("the PDDL problem does not place exactly one agent at exactly one location")
    types: dict[str, set[str]] = defaultdict(set)
    for thing, kind in facts.get("objecttype", ()) + facts.get("receptacletype", ()):
        types[thing].add(kind)
    located = sorted(facts.get("receptacleatlocation", ()))
    return House(
        agent=agents[0],
        names=_name_things(
            {argument for found in facts.values() for arguments in found for argument in arguments}
        ),
        receptacles=tuple(receptacle for receptacle, _ in located),
        places=_group(located),
        at_place=_group((location, receptacle) for receptacle, location in located),
        can={
            ability: frozenset(thing for (thing,) in facts.get(ability, ()))
            for ability in _ABILITIES
        },
        types={thing: frozenset(kinds) for thing, kinds in types.items()},
        accepts=_acceptances(problem),
        inner=_group(
            (outer, inner) for inner, outer in sorted(facts.get("inreceptacleobject", ()))
        ),
        start=frozenset(
            (predicate, *arguments)
            for predicate in _FLUENTS
            for arguments in facts.get(predicate, ())
        ),
        goal=ground_goal(problem, frozenset(_FLUENTS)),
    )


def _group(pairs: Iterable[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return {key: tuple(values) for key, values in groups.items()}


def _acceptances(problem: Problem) -> frozenset[tuple[str, str]]:
    objects_of_type: dict[str, list[str]] = defaultdict(list)
    for thing, kind in problem.facts.get("objecttype", ()):
        objects_of_type[kind].append(thing)
    receptacles_of_type: dict[str, list[str]] = defaultdict(list)
    for receptacle, kind in problem.facts.get("receptacletype", ()):
        receptacles_of_type[kind].append(receptacle)
    return frozenset(
        (receptacle, thing)
        for outer, inner in problem.facts.get("cancontain", ())
        for receptacle in receptacles_of_type.get(outer, ())
        for thing in objects_of_type.get(inner, ())
    )


def _name_things(identifiers: set[str]) -> dict[str, str]:
    """`mug_bar_…` -> "mug 2", numbered per kind; the first identifier has the highest number."""
    names = {identifier: identifier for identifier in identifiers}  # places, types, the agent
    kinds = {}
    for identifier in identifiers:
        kind, separator, _ = identifier.partition("_bar_")
        if separator:
            kinds[identifier] = kind + "basin" if "basin" in identifier else kind
    remaining = Counter(kinds.values())
    for identifier in sorted(kinds):
        kind = kinds[identifier]
        names[identifier] = f"{kind} {remaining[kind]}"
        remaining[kind] -= 1
    return names
