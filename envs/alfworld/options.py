"""`[environment.options]` of an ALFWorld run."""

from math import isfinite

from msgspec import Struct

from capo.envs import registry
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
    """The options, or a ConfigError that names the key and what it may be."""
    read = registry.read_options(options, AlfworldOptions)
    splits = (read.train, read.valid, read.test)
    if len(set(splits)) < len(splits):
        raise ConfigError(
            f"environment.options names the same games twice: train, valid and test are {splits}"
        )
    if not read.families:
        raise ConfigError("environment.options.families is empty; leave it out to play all six")
    for family in read.families:
        if family not in FAMILIES:
            raise ConfigError(
                f"environment.options.families has an unknown {family!r}"
                f"{registry.nearest(family, FAMILIES)}"
            )
    for name, least in (("max_steps", 1), ("history", 0), ("invalid_penalty", 0)):
        if (value := getattr(read, name)) < least:
            raise ConfigError(f"environment.options.{name} is {value}; it must be at least {least}")
    for name in ("success_reward", "format_reward", "invalid_penalty"):
        if not isfinite(value := getattr(read, name)):
            raise ConfigError(f"environment.options.{name} is {value}; it must be a finite number")
    return read
