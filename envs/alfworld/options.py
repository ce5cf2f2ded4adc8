"""`[environment.options]` of an ALFWorld run."""

from difflib import get_close_matches
from math import isfinite

import msgspec
from msgspec import Struct

from capo.envs.alfworld.games import FAMILIES
from capo.envs.api import Options, Split
from capo.protocol.errors import ConfigError


class AlfworldOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Splits are named as on disk; rewards add up: a step's format part, and success at the end."""

    data: str = ""  # folder of the games; "" = $ALFWORLD_DATA
    train: str = "train"
    valid: str = "valid_seen"
    test: str = "valid_unseen"
    families: tuple[str, ...] = FAMILIES
    max_steps: int = 20
    history: int = 20  # how many of the last commands a prompt repeats
    success_reward: float = 1.0
    format_reward: float = 0.005  # for a call of the tool with an admissible command
    invalid_penalty: float = 0.05  # subtracted for any other answer

    def folder_of(self, split: Split) -> str:
        return {"train": self.train, "valid": self.valid, "test": self.test}[split]


def read_options(options: Options) -> AlfworldOptions:
    known = AlfworldOptions.__struct_fields__
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"environment.options has no key {name!r}; {hint}")
    try:
        read = msgspec.convert(dict(options), AlfworldOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"environment.options: {error}") from error
    _check(read)
    return read


def _check(options: AlfworldOptions) -> None:
    splits = (options.train, options.valid, options.test)
    if len(set(splits)) < len(splits):
        raise ConfigError(
            f"environment.options names the same games twice: train, valid and test are {splits}"
        )
    for family in options.families:
        if family not in FAMILIES:
            (near,) = get_close_matches(family, FAMILIES, n=1, cutoff=0.0)
            raise ConfigError(
                f"environment.options.families has no {family!r}; did you mean {near!r}?"
            )
    if not options.families:
        raise ConfigError("environment.options.families is empty; leave it out to play all six")
    for name, least in (("max_steps", 1), ("history", 0), ("invalid_penalty", 0)):
        if (value := getattr(options, name)) < least:
            raise ConfigError(f"environment.options.{name} is {value}; it must be at least {least}")
    for name in ("success_reward", "format_reward", "invalid_penalty"):
        if not isfinite(value := getattr(options, name)):
            raise ConfigError(f"environment.options.{name} is {value}; it must be a finite number")
