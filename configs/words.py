"""What is right where something is wrong: the nearest word, the choices at a place of a Struct."""

import difflib
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

import msgspec


def nearest(wrong: str, right: Iterable[str]) -> str:
    """ "did you mean 'X'?" where something is close, else "known are: ..."."""
    known = sorted(right)
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(known)}."


def choices(struct: Any, path: str) -> list[str]:
    """The words that "table.key[...]" of `struct` may hold; none where it is no choice of words."""
    found: Any = struct
    for part in path.split("."):
        name = part.partition("[")[0]
        inner = struct_in(found)
        types = {one.name: one.type for one in msgspec.structs.fields(inner)} if inner else {}
        if name not in types:
            return []
        found = types[name]
    return [str(word) for word in _literals(found)]


def struct_in(annotation: Any) -> Any:
    """The Struct that a field of this type holds, None where it holds none."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            return candidate
    return None


def _literals(annotation: Any) -> list[object]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word for inner in get_args(annotation) for word in _literals(inner)]
