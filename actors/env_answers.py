"""What an environment answered, checked field by field: what is not of its type is an EnvError.

What comes out is plain data of our own types: no code of the environment runs when it is used, and
every text can be encoded as UTF-8, so it can be rendered and travels. Sizes are not checked.
"""

import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from capo.actors.foreign import sentence, shown
from capo.envs.api import JSON, Message, Observation, Tool, Transition
from capo.protocol.errors import EnvError

T = TypeVar("T")


def checked_transition(transition: object) -> Transition:
    """All but its observation, which is for `checked_observation`: the reward is told before."""
    if not isinstance(transition, Transition):
        raise EnvError(f"step returned a {type(transition).__name__}, not a Transition")
    return Transition(
        observation=transition.observation,
        reward=_number("reward", transition.reward),
        terminated=_flag("terminated", transition.terminated),
        truncated=_flag("truncated", transition.truncated),
        outcome=_number("outcome", transition.outcome),
        info=_info(transition.info),
    )


def checked_observation(observation: object) -> Observation:
    """The same observation; EnvError names the first field that is of a wrong type."""
    if not isinstance(observation, Observation):
        raise EnvError(
            f"the environment returned a {type(observation).__name__} where an Observation belongs"
        )
    messages = _items("messages", observation.messages)
    tools = _items("tools", observation.tools)
    return Observation(
        messages=tuple(_message(f"messages[{i}]", one) for i, one in enumerate(messages)),
        tools=tuple(_tool(f"tools[{i}]", one) for i, one in enumerate(tools)),
        rebuilt=_flag("rebuilt", observation.rebuilt),
        state_key=_text("state_key", observation.state_key),
    )


def _message(name: str, message: object) -> Message:
    if not isinstance(message, Message):
        raise _wrong(name, message, "Message")
    return Message(_text(f"{name}.role", message.role), _text(f"{name}.content", message.content))


def _tool(name: str, tool: object) -> Tool:
    if not isinstance(tool, Tool):
        raise _wrong(name, tool, "Tool")
    if not isinstance(tool.parameters, dict):
        raise _wrong(f"{name}.parameters", tool.parameters, "dict")
    return Tool(
        name=_text(f"{name}.name", tool.name),
        description=_text(f"{name}.description", tool.description),
        parameters=_converted(f"{name}.parameters", _plain_json, tool.parameters),
    )


def _plain_json(value: object) -> dict[str, JSON]:
    plain: dict[str, JSON] = json.loads(
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    )
    return plain


def _items(name: str, values: object) -> tuple[object, ...]:
    if not isinstance(values, tuple | list):
        raise _wrong(name, values, "tuple")
    return _converted(name, tuple, values)


def _info(info: object) -> dict[str, float]:
    if not isinstance(info, dict):
        raise _wrong("info", info, "dict")
    return {
        _text("a name in info", name): _number(f"info[{shown(name)}]", value)
        for name, value in _converted("info", dict, info).items()
    }


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "string")
    text = str.__str__(value)  # plain also where a subclass, like numpy's, came
    _converted(name, str.encode, text)
    return text


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise _wrong(name, value, "bool")
    return bool(value)


def _number(name: str, value: object) -> float:
    if isinstance(value, str | bytes | bytearray) or value is None:
        raise _wrong(name, value, "number")
    number = _converted(name, float, value)  # numpy's scalars and one-element tensors too
    if not math.isfinite(number):
        raise EnvError(f"the environment returned {number} as {name}")
    return number


def _converted(name: str, convert: Callable[[Any], T], value: object) -> T:
    try:
        return convert(value)
    except BaseException as error:  # the methods of a value are foreign code, sys.exit() included
        raise EnvError(
            f"the environment returned {shown(value)} as {name}: {sentence(error)}"
        ) from error


def _wrong(name: str, value: object, kind: str) -> EnvError:
    return EnvError(f"the environment returned {shown(value)} as {name}, which is not a {kind}")
