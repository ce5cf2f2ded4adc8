"""Finds an environment by `module:name` and hands it its options. Knows no environment itself.

Every mistake of a configuration ends as one ConfigError sentence that names the nearest right name.
"""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Iterable
from typing import TypeVar, cast

import msgspec

from capo.envs.api import EnvFactory, Options
from capo.protocol.errors import ConfigError

StructType = TypeVar("StructType", bound=msgspec.Struct)


def load_factory(name: str, options: Options) -> EnvFactory:
    """Imports `module:name` and calls it with `options`; ConfigError for what does not work.

    It is a class that is an EnvFactory, or a function annotated to return one. Modules are looked
    for where Python does, and in the current folder.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(
            f"environment.factory is {name!r}; write it as module:name,"
            " for example capo.envs.household:make"
        )
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
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
    except Exception as error:  # whatever a foreign module does when it is imported
        raise ConfigError(
            f"environment.factory {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, attribute):
        hint = nearest(
            attribute,
            (
                key
                for key, value in vars(module).items()
                if callable(value) and str(getattr(value, "__module__", "")).startswith(module_name)
            ),
        )
        raise ConfigError(f"environment.factory: {module_name} has no {attribute!r}{hint}")
    maker = getattr(module, attribute)
    if not _is_factory(_what_it_makes(maker)):
        raise ConfigError(
            f"environment.factory {name!r} is a {type(maker).__name__} and was not called: it must"
            " be a class with tasks() and make(), or a function that is annotated to return one"
        )
    try:
        factory = maker(options)
    except ConfigError:
        raise
    except Exception as error:  # a foreign maker
        raise ConfigError(
            f"environment.factory {name!r} could not be called with its options: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not _is_factory(factory):
        raise ConfigError(
            f"environment.factory {name!r} returned a {type(factory).__name__} without tasks() or"
            " make(); it must return a capo.envs.api.EnvFactory"
        )
    return cast(EnvFactory, factory)


def _what_it_makes(maker: object) -> object:
    """The class that calling `maker` gives, by its word. The name may come from a stranger's run
    file or from a learner, so nothing is called that does not say that it makes environments."""
    if inspect.isclass(maker) or not callable(maker):
        return maker
    try:
        return inspect.get_annotations(maker, eval_str=True).get("return")
    except Exception:  # annotations that cannot be resolved say nothing
        return None


def _is_factory(thing: object) -> bool:
    return all(callable(getattr(thing, method, None)) for method in ("tasks", "make"))


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
