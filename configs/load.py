"""From a TOML file and `--set` overrides to a RunConfig, or one sentence on why not.

Knows no torch and no environment: what only those can judge is judged where they are loaded.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from capo.configs.algorithms import (
    AlgorithmConfig,
    compares_returns,
    needs_entropy,
    needs_groups,
    resolve,
)
from capo.configs.schema import RunConfig
from capo.configs.validate import problems
from capo.configs.words import choices, nearest, struct_in

GROUP_SIZE = 8  # of group methods, where the file does not say (paper, section 4.1)
FLAT_BATCHES = 10  # replaced per update, of methods that drop flat groups


class InvalidConfigError(ValueError):
    """A configuration that cannot run. Its text is one sentence for the user."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override, resolve and validate.

    Args:
        path: a TOML file, or the name of one that ships with the package ("quickstart").
        overrides: "learner.policy_lr=1e-6" assignments; values are TOML, bare words are strings.

    Raises:
        InvalidConfigError: missing file, broken TOML, unknown key, wrong type, impossible value.
    """
    file = find(path)
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfigError(f"{file} is not valid TOML: {error}.") from error
    for assignment in overrides:
        apply_override(raw, assignment)
    return from_raw(raw, str(file))


def from_raw(raw: dict[str, Any], origin: str) -> RunConfig:
    """A nested dict, as TOML gives it, as a validated RunConfig. `origin` names it in errors."""
    raw = dict(raw)
    algorithm = raw.pop("algorithm", "capo")
    _refuse_unknown_keys(raw, RunConfig, "", origin)
    try:
        config = _fill_in(msgspec.convert(raw, RunConfig), resolve(algorithm))
    except msgspec.ValidationError as error:
        raise InvalidConfigError(f"{origin}: {_plain(str(error))}") from error
    except ValueError as error:
        raise InvalidConfigError(f"{origin}: {error}") from error
    found = problems(config)
    if found:
        raise InvalidConfigError(f"{origin}: {found[0]}")
    return config


def to_raw(config: RunConfig) -> dict[str, Any]:
    """What `from_raw` reads back as `config`: every key is stated but those that are None, since
    TOML has no null."""
    return _without_none(msgspec.to_builtins(config))


def _without_none(table: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if value is not None
    }


def _fill_in(config: RunConfig, algorithm: AlgorithmConfig) -> RunConfig:
    """With the resolved algorithm, and with what it decides where the file left it open."""
    scheduler, rollout = config.scheduler, config.rollout
    if scheduler.group_size == 0:
        size = GROUP_SIZE if needs_groups(algorithm) else 1
        scheduler = msgspec.structs.replace(scheduler, group_size=size)
    if scheduler.max_flat_batches == -1:
        resamples = algorithm.drop_flat_groups and compares_returns(algorithm)
        batches = FLAT_BATCHES if resamples else 0
        scheduler = msgspec.structs.replace(scheduler, max_flat_batches=batches)
    if needs_entropy(algorithm):
        rollout = msgspec.structs.replace(rollout, record_entropy=True)
    return msgspec.structs.replace(
        config, algorithm=algorithm, scheduler=scheduler, rollout=rollout
    )


def find(path: str | Path) -> Path:
    """The file itself, or the packaged configuration of that name."""
    file = Path(path)
    if file.is_file():
        return file
    if file.is_dir():
        raise InvalidConfigError(f"{file} is a folder; a configuration is a TOML file.")
    packaged = Path(__file__).parent / f"{file.name.removesuffix('.toml')}.toml"
    if packaged.is_file() and file.parent in (Path(), Path("configs")):
        return packaged
    names = sorted(entry.stem for entry in Path(__file__).parent.glob("*.toml"))
    raise InvalidConfigError(
        f"There is no configuration {str(path)!r}; give a TOML file or one of: {', '.join(names)}."
    )


def apply_override(raw: dict[str, Any], assignment: str) -> None:
    """Apply "table.key=value" in place. The value is TOML; what is not TOML is a string."""
    key, separator, text = assignment.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise InvalidConfigError(
            f"--set takes KEY=VALUE, as in learner.policy_lr=1e-6; got {assignment!r}."
        )
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    if parts == ["algorithm"]:
        value = {"preset": value}
    if parts == ["algorithm", "clip"]:  # one word for both sides, whatever the file says of them
        for side in ("clip_low", "clip_high"):
            apply_override(raw, f"algorithm.{side}={text}")
        return
    table = raw
    for part in parts[:-1]:
        inner = table.setdefault(part, {})
        if part == "algorithm" and isinstance(inner, str):
            inner = table[part] = {"preset": inner}
        if not isinstance(inner, dict):
            raise InvalidConfigError(f"--set {assignment}: {part!r} is a value, not a table.")
        table = inner
    table[parts[-1]] = value


def to_json(config: RunConfig) -> bytes:
    return msgspec.json.encode(config)


def from_json(data: bytes) -> RunConfig:
    """Read back what `to_json` wrote, as it lies in a run file. No presets, no overrides."""
    config = msgspec.json.decode(data, type=RunConfig)
    if config.scheduler.max_flat_batches == -1:  # written before there was such a thing
        scheduler = msgspec.structs.replace(config.scheduler, max_flat_batches=0)
        config = msgspec.structs.replace(config, scheduler=scheduler)
    return config


def _refuse_unknown_keys(raw: Mapping[str, Any], struct: Any, prefix: str, origin: str) -> None:
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in raw.items():
        name = f"{prefix}.{key}" if prefix else key
        if key not in fields:
            raise InvalidConfigError(
                f"{origin}: unknown key {name!r}; {nearest(key, list(fields))}"
            )
        inner = struct_in(fields[key])
        if inner is not None and isinstance(value, Mapping):
            _refuse_unknown_keys(value, inner, name, origin)


def _plain(text: str) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.learner.epochs`" as a sentence."""
    message, _, place = text.partition(" - at `$.")
    where = place.rstrip("`")
    message = message.replace("`", "")
    if message.startswith("Object missing required field "):
        missing = message.removeprefix("Object missing required field ")
        return f"{where}.{missing} is missing." if where else f"{missing} is missing."
    if message.startswith("Invalid enum value "):
        wrong = message.removeprefix("Invalid enum value ").strip("'")
        return f"{where}: {wrong!r} is not possible; {nearest(wrong, choices(RunConfig, where))}"
    return f"{where}: {message[:1].lower()}{message[1:]}."
