"""Reads a PDDL problem: which objects exist, what holds at the start, what the goal says.

It knows the syntax of problems only; what a predicate means is `house`'s and `world`'s. As in PDDL,
names are case-insensitive: everything here is lower case.
"""

import re
from collections.abc import Sequence

from msgspec import Struct

from capo.protocol.errors import EnvError

Expression = str | list["Expression"]
Arguments = tuple[str, ...]
Atom = tuple[str, ...]  # predicate, then arguments

_COMMENT = re.compile(r";[^\n]*")
_TOKEN = re.compile(r"[()]|[^\s()]+")


class Problem(Struct, frozen=True):
    """`objects` maps names to types, `facts` predicates to the argument tuples they hold for."""

    objects: dict[str, str]
    facts: dict[str, tuple[Arguments, ...]]
    goal: Expression


def read_problem(text: str) -> Problem:
    """The problem that `text` defines; EnvError says what is wrong with it."""
    sections = {
        section[0]: section[1:]
        for section in _read_expression(text)
        if isinstance(section, list) and section and isinstance(section[0], str)
    }
    missing = [name for name in (":objects", ":init", ":goal") if name not in sections]
    if missing:
        raise EnvError(f"the PDDL problem has no {' and no '.join(missing)} section")
    if len(sections[":goal"]) != 1:
        raise EnvError(f"the PDDL problem's goal has {len(sections[':goal'])} expressions, not 1")
    facts: dict[str, list[Arguments]] = {}
    for fact in sections[":init"]:
        predicate, *arguments = atom(fact)
        facts.setdefault(predicate, []).append(tuple(arguments))
    return Problem(
        objects=read_typed(sections[":objects"]),
        facts={predicate: tuple(found) for predicate, found in facts.items()},
        goal=sections[":goal"][0],
    )


def atom(expression: Expression) -> Atom:
    """A flat list of names as a tuple."""
    names = tuple(part for part in expression if isinstance(part, str))
    if isinstance(expression, str) or not names or len(names) != len(expression):
        raise EnvError(f"{_show(expression)} stands in the PDDL problem where an atom should")
    return names


def read_typed(names: Sequence[Expression]) -> dict[str, str]:
    """`a b - place c - thing` as `{a: place, b: place, c: thing}`, in order."""
    typed: dict[str, str] = {}
    untyped: list[str] = []
    tokens = iter(names)
    for token in tokens:
        if not isinstance(token, str):
            raise EnvError(f"{_show(token)} stands in the PDDL problem where a name should")
        if token != "-":
            untyped.append(token)
            continue
        kind = next(tokens, None)
        if not isinstance(kind, str):
            raise EnvError("a list of names in the PDDL problem ends where a type should follow")
        typed.update(dict.fromkeys(untyped, kind))
        untyped.clear()
    if untyped:
        raise EnvError(f"{untyped[0]!r} has no type in the PDDL problem")
    return typed


def _read_expression(text: str) -> list[Expression]:
    """The one parenthesised expression in `text` as nested lists."""
    outermost: list[Expression] = []
    innermost, around = outermost, []
    for token in _TOKEN.findall(_COMMENT.sub("", text).lower()):
        if token == "(":
            inner: list[Expression] = []
            innermost.append(inner)
            around.append(innermost)
            innermost = inner
        elif token != ")":
            innermost.append(token)
        elif around:
            innermost = around.pop()
        else:
            raise EnvError("the PDDL problem closes a parenthesis that was never opened")
    if around:
        raise EnvError(f"the PDDL problem ends with {len(around)} parentheses still open")
    if len(outermost) != 1 or isinstance(outermost[0], str):
        raise EnvError("the text is not one parenthesised PDDL problem")
    return outermost[0]


def _show(expression: Expression) -> str:
    if isinstance(expression, str):
        return expression
    return "(" + " ".join(map(_show, expression)) + ")"
