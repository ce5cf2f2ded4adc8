"""Grounds a goal once, so that testing it costs a few set look-ups a step.

A goal is a conjunction of clauses; a clause asks for objects that satisfy a conjunction of atoms
and inequalities. All six task families have this form. Atoms that no action changes are solved
here; what remains per choice of objects are the atoms that must be true at the same time.
"""

from collections.abc import Iterator, Mapping
from itertools import product

from msgspec import Struct

from capo.envs.alfworld.problem import Arguments, Atom, Expression, Problem, atom, read_typed
from capo.protocol.errors import EnvError

Binding = dict[str, str]
Choice = tuple[Atom, ...]  # true together
Goal = tuple[tuple[Choice, ...], ...]  # of every clause one choice must be true


class _Clause(Struct, frozen=True):
    variables: dict[str, str]  # name -> type
    atoms: list[Atom]
    unequal: list[Atom]  # pairs of terms


def ground_goal(problem: Problem, fluents: frozenset[str]) -> Goal:
    """The goal of `problem`, where `fluents` are the predicates that actions change."""
    goal = problem.goal
    parts = goal[1:] if isinstance(goal, list) and goal[:1] == ["and"] else [goal]
    return tuple(tuple(_choices(_read_clause(part), problem, fluents)) for part in parts)


def is_reached(goal: Goal, facts: set[Atom]) -> bool:
    return all(any(facts.issuperset(choice) for choice in choices) for choices in goal)


def _read_clause(expression: Expression) -> _Clause:
    clause = _Clause(variables={}, atoms=[], unequal=[])
    _collect(expression, clause)
    return clause


def _collect(expression: Expression, clause: _Clause) -> None:
    match expression:
        case ["and", *parts]:
            for part in parts:
                _collect(part, clause)
        case ["exists", [*variables], body]:
            typed = read_typed(variables)
            if repeated := clause.variables.keys() & typed.keys():
                raise EnvError(f"the goal quantifies {min(repeated)} twice, which is not supported")
            clause.variables.update(typed)
            _collect(body, clause)
        case ["not", ["=", str(left), str(right)]]:
            clause.unequal.append((left, right))
        case ["not" | "or" | "imply" | "forall" | "when" | "=" as operator, *_]:
            raise EnvError(f"the goal uses {operator!r} in a way that is not supported")
        case _:
            clause.atoms.append(atom(expression))


def _choices(clause: _Clause, problem: Problem, fluents: frozenset[str]) -> Iterator[Choice]:
    static = [found for found in clause.atoms if found[0] not in fluents]
    changing = [found for found in clause.atoms if found[0] in fluents]
    for solved in _solve(static, {}, problem.facts):
        free = [name for name in clause.variables if name not in solved]
        domains = [
            [name for name, kind in problem.objects.items() if kind == clause.variables[variable]]
            for variable in free
        ]
        for values in product(*domains):
            binding = solved | dict(zip(free, values, strict=True))
            pairs = [[binding.get(term, term) for term in pair] for pair in clause.unequal]
            if all(left != right for left, right in pairs):
                yield tuple(
                    (predicate, *(binding.get(term, term) for term in terms))
                    for predicate, *terms in changing
                )


def _solve(
    atoms: list[Atom], binding: Binding, facts: Mapping[str, tuple[Arguments, ...]]
) -> Iterator[Binding]:
    """All ways to make the atoms facts."""
    if not atoms:
        yield binding
        return
    (predicate, *terms), *others = atoms
    for arguments in facts.get(predicate, ()):
        extended = dict(binding)
        if len(arguments) == len(terms) and all(
            _matches(term, value, extended) for term, value in zip(terms, arguments, strict=True)
        ):
            yield from _solve(others, extended, facts)


def _matches(term: str, value: str, binding: Binding) -> bool:
    if term.startswith("?"):
        return binding.setdefault(term, value) == value
    return term == value
