"""docs/configuration.md, made from the schema: every key, its type, default and meaning.

`python -m capo.configs.reference` prints it; a test keeps the file and the schema together.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from capo.configs import algorithms, schema
from capo.configs.words import struct_in

INTRODUCTION = """\
# Configuration

A run is one TOML file; `capo check FILE` prints it with all defaults filled in.
`--set table.key=value` changes a value, and can be given several times. Defaults are the paper's
where it gives one. What an algorithm is composed of: [algorithms.md](algorithms.md).

`--set algorithm=NAME` takes a preset as it is, in place of the file's whole `[algorithm]`;
`--set algorithm.preset=NAME` keeps what else stands there. `--set algorithm.clip=X` sets both sides
of the clip range. `--set algorithm.dual_clip=none` switches off what a preset sets, as it does for
every key of `[algorithm]` whose default is `none`; in a file it is `dual_clip = "none"`.
`capo check` names the changed keys that nothing reads in the composition; so does a learner at its
start.
"""


def lines() -> Iterator[str]:
    yield INTRODUCTION
    yield from _table("", schema.RunConfig, schema)
    for field in msgspec.structs.fields(schema.RunConfig):
        struct = struct_in(field.type)
        if struct is not None:
            module = algorithms if struct is algorithms.AlgorithmConfig else schema
            yield from _table(field.name, struct, module)
            for inner in msgspec.structs.fields(struct):
                if (nested := struct_in(inner.type)) is not None:
                    yield from _table(f"{field.name}.{inner.name}", nested, schema)


def _table(name: str, struct: Any, module: Any) -> Iterator[str]:
    yield f"## [{name}]\n" if name else "## At the top\n"
    yield inspect.cleandoc(struct.__doc__ or "").replace("\n", " ") + "\n"
    yield "| key | type | default | |"
    yield "|---|---|---|---|"
    comments = _comments(struct, module)
    for field in msgspec.structs.fields(struct):
        if struct_in(field.type) is None:
            yield (
                f"| `{field.name}` | {_type(field.type)} | {_default(field)} | "
                f"{comments.get(field.name, '')} |"
            )
    yield ""


def _comments(struct: Any, module: Any) -> dict[str, str]:
    """What stands behind `#` in the line of a field, or in the comment lines before it."""
    source = inspect.getsource(module)
    (node,) = [
        found
        for found in ast.parse(source).body
        if isinstance(found, ast.ClassDef) and found.name == struct.__name__
    ]
    text = source.splitlines()
    return {
        field.target.id: text[(field.end_lineno or field.lineno) - 1].partition("  # ")[2]
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {_type(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "table"
    if get_origin(annotation) is Union or type(annotation).__name__ == "UnionType":
        return " or ".join(_type(one) for one in get_args(annotation) if one is not type(None))
    return {"str": "text", "int": "integer", "float": "number", "bool": "true, false"}.get(
        getattr(annotation, "__name__", ""), str(annotation)
    )


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    if field.default is msgspec.NODEFAULT:
        return "`{}`"
    value = field.default
    if isinstance(value, tuple):
        value = list(value)
    return "`" + msgspec.json.encode(value).decode().replace("null", "none") + "`"


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()))
