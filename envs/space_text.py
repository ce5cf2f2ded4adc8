"""Gymnasium's spaces as text: what an agent reads of an observation, and the action in its words.

Numbers and arrays are written as JSON. An action of a Discrete space may have names.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

_DECIMALS = 4
_TAGGED = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)
_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)


def show(observation: Any) -> str:
    """An observation of any space; an object is one line per key."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {show(value)}" for key, value in observation.items())
    return json.dumps(_plain(observation))


def show_rendered(text: str) -> str:
    """What `render_mode="ansi"` gives, with colours as brackets: they may be the only sign of
    where something is."""
    return _COLOURED.sub(r"[\1]", text).rstrip("\n")


def describe(space: spaces.Space[Any], names: Sequence[str] = ()) -> str:
    """One sentence on what an action is. `names` are of a Discrete space's actions, in order.

    Raises ValueError if `names` do not fit the space, or no text can be an action of it.
    """
    if (unreadable := _unreadable(space)) is not None:
        raise ValueError(f"no answer can be an action of {unreadable}")
    if names:
        if not isinstance(space, spaces.Discrete) or space.n != len(names):
            raise ValueError(f"{len(names)} names of actions do not fit the action space {space}")
        folded = [name.strip().casefold() for name in names]
        if len(set(folded)) < len(names) or "" in folded:
            raise ValueError(f"names of actions must differ and not be empty, got {list(names)}")
        return f"Answer with exactly one of: {', '.join(names)}."
    if isinstance(space, spaces.Discrete):
        return f"Answer with one whole number from {space.start} to {space.start + space.n - 1}."
    if isinstance(space, spaces.Text):
        return "Answer with a text."
    return f"Answer with JSON that is a value of {space}."


def read_action(space: spaces.Space[Any], text: str, names: Sequence[str] = ()) -> Any:
    """The action in an agent's answer: all of it, or what stands between <action> and </action>.
    What stands before the last </think> is thought, not said.

    Raises ValueError, with a sentence for the agent, if it is none of `space`.
    """
    spoken = text.rpartition("</think>")[2]
    if "<think>" in spoken:
        raise ValueError("The thought was never finished, so there is no action.")
    said = (_TAGGED.findall(spoken) or [spoken])[-1].strip()
    if isinstance(space, spaces.Text):
        action: Any = said
    elif names:
        folded = [name.strip().casefold() for name in names]
        if said.casefold() not in folded:
            raise ValueError(f"{_short(said)} is not an action.")
        action = _value(space, folded.index(said.casefold()) + _start(space))
    else:
        try:
            action = _value(space, json.loads(said))
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise ValueError(f"{_short(said)} cannot be read as an action.") from None
    if not _contains(space, action):
        raise ValueError(f"{_short(said)} is not a possible action.")
    return action


def _value(space: spaces.Space[Any], read: Any) -> Any:
    """What JSON gave, as `space` has it. Raises ValueError or TypeError where it cannot be that."""
    if isinstance(space, spaces.Dict):
        if not isinstance(read, dict) or set(read) != set(space.spaces):
            raise ValueError("other keys")
        return {key: _value(inner, read[key]) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(read, list) or len(read) != len(space.spaces):
            raise ValueError("another length")
        return tuple(_value(*pair) for pair in zip(space.spaces, read, strict=True))
    if isinstance(space, spaces.Text):
        return read
    values = np.asarray(read)
    if values.dtype.kind not in "if" or values.shape != space.shape:
        raise ValueError("not these numbers")
    with np.errstate(all="ignore"):
        converted = values.astype(space.dtype)
    if not np.isfinite(converted).all():
        raise ValueError("not finite")
    if np.issubdtype(converted.dtype, np.integer) and not np.array_equal(converted, values):
        raise ValueError("not whole numbers")
    return converted if space.shape else converted[()]


def _contains(space: spaces.Space[Any], action: Any) -> bool:
    """Of a text only the length counts: the letters that `Text` allows unless told otherwise are
    letters and digits, without so much as a space, and hardly ever meant."""
    if isinstance(space, spaces.Text):
        return isinstance(action, str) and space.min_length <= len(action) <= space.max_length
    if isinstance(space, spaces.Dict):
        return all(_contains(inner, action[key]) for key, inner in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return all(_contains(*pair) for pair in zip(space.spaces, action, strict=True))
    return space.contains(action)


def _unreadable(space: spaces.Space[Any]) -> spaces.Space[Any] | None:
    """The first space in `space` whose values are no array of known shape, as Sequence and Graph;
    None if there is none."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return next((found for one in inner if (found := _unreadable(one)) is not None), None)
    return space if space.shape is None and not isinstance(space, spaces.Text) else None


def _start(space: spaces.Space[Any]) -> int:
    assert isinstance(space, spaces.Discrete)
    return int(space.start)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return round(value, _DECIMALS)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return value if isinstance(value, bool | int | str) or value is None else str(value)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
