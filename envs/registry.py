"""Finds an environment by `module:name` and hands it its options. Knows no environment itself.

Every mistake of a configuration ends as one ConfigError sentence that names the nearest right name.
"""

import difflib
import importlib
from collections.abc import Iterable
from typing import TypeVar, cast

import msgspec

from capo.envs.api import EnvFactory, Options
from capo.protocol.errors import ConfigError

StructType = TypeVar("StructType", bound=msgspec.Struct)


def load_factory(name: str, options: Options) -> EnvFactory:
    """Imports `module:name` and calls it with `options`; ConfigError for what is not there."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(
            f"environment.factory is {name!r}; write it as module:name,"
            " for example capo.envs.household:make"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise ConfigError(
                f"environment.factory {name!r}: there is no module {error.name!r};"
                " check the spelling, or install the package that has it"
            ) from error
        raise ConfigError(
            f"environment.factory {name!r} needs the package {error.name!r}; install it"
        ) from error
    if not hasattr(module, attribute):
        hint = nearest(attribute, (key for key in vars(module) if not key.startswith("_")))
        raise ConfigError(f"environment.factory: {module_name} has no {attribute!r}{hint}")
    maker = getattr(module, attribute)
    if not callable(maker):
        raise ConfigError(
            f"environment.factory {name!r} is a {type(maker).__name__}; it must be callable with"
            " the options and return a factory"
        )
    factory = maker(options)
    for method in ("tasks", "make"):
        if not callable(getattr(factory, method, None)):
            raise ConfigError(
                f"environment.factory {name!r} returned a {type(factory).__name__} without"
                f" {method}(); it must return a capo.envs.api.EnvFactory"
            )
    return cast(EnvFactory, factory)


def read_options(options: Options, struct: type[StructType]) -> StructType:
    """Converts a table of options strictly. ConfigError names the key, or the nearest right one."""
    known = struct.__struct_fields__
    for key in options:
        if key not in known:
            raise ConfigError(f"environment.options has no key {key!r}{nearest(key, known)}")
    try:
        return msgspec.convert(dict(options), struct)
    except msgspec.ValidationError as error:
        message = str(error).replace(" - at `$.", " at `environment.options.")
        raise ConfigError(f"environment.options: {message}") from error


def nearest(wrong: str, right: Iterable[str]) -> str:
    """The end of a sentence: '; did you mean X?', or the names to choose from, or nothing."""
    names = sorted(right)
    close = difflib.get_close_matches(wrong, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; it has {', '.join(names)}" if names else ""
