"""A configuration written out as TOML, defaults included; `load` reads it back as the same."""

from collections.abc import Iterator
from typing import Any

import msgspec

from capo.configs.load import to_raw
from capo.configs.schema import RunConfig


def toml_lines(config: RunConfig) -> Iterator[str]:
    tables = to_raw(config)
    yield from _assignments(tables)
    yield from _tables(tables, "")


def _tables(table: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            name = f"{prefix}{key}"
            yield ""
            yield f"[{name}]"
            yield from _assignments(value)
            yield from _tables(value, f"{name}.")


def _assignments(table: dict[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, dict):
            yield f"{key} = {_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    return repr(value)
