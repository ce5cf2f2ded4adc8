"""`capo check CONFIG`: the resolved configuration and what it will need. Starts nothing."""

import argparse
from collections.abc import Iterator

import msgspec

from capo.configs import algorithms
from capo.configs.load import load
from capo.configs.schema import RunConfig
from capo.launch.plan import plan_lines


def command(args: argparse.Namespace) -> int:
    config = load(args.config, args.overrides)
    print("\n".join(config_lines(config)))
    print("\n# algorithm")
    print("\n".join(f"#   {line}" for line in algorithms.describe(config.algorithm)))
    print("\n# plan")
    print("\n".join(f"#   {line}" for line in plan_lines(config)))
    return 0


def config_lines(config: RunConfig) -> Iterator[str]:
    """The whole configuration as TOML, defaults included."""
    tables = msgspec.to_builtins(config)
    yield from _assignments({k: v for k, v in tables.items() if not isinstance(v, dict)})
    yield from _tables(tables, "")


def _tables(table: dict[str, object], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            name = f"{prefix}{key}"
            yield ""
            yield f"[{name}]"
            yield from _assignments({k: v for k, v in value.items() if not isinstance(v, dict)})
            yield from _tables(value, f"{name}.")


def _assignments(values: dict[str, object]) -> Iterator[str]:
    for key, value in values.items():
        if value is not None:
            yield f"{key} = {_toml(value)}"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    return repr(value)
