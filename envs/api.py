"""What an environment is: async, Gymnasium-like, one call per complete action.

An observation is a list of chat messages plus tool schemas (OpenAI format); an action is the
assistant's message, with the tool calls that were found in it. Environments know nothing of tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from capo.protocol.records import Task

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]
Split = Literal["train", "valid", "test"]


class ToolCall(Struct, frozen=True):
    """A function call. `arguments` is an object; OpenAI's JSON string is converted at the edge."""

    name: str
    arguments: dict[str, JSON]


class Message(Struct, frozen=True):
    """One chat message. `role` is system, user, assistant or tool."""

    role: str
    content: str


class Tool(Struct, frozen=True):
    """A function the agent may call; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, JSON]


class Observation(Struct, frozen=True, kw_only=True):
    """What the agent sees before an action.

    `rebuilt`: `messages` are the whole prompt, and what was said before is forgotten unless it is
    repeated here. Otherwise they continue the dialogue. `state_key` is equal for equal states of a
    task.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    rebuilt: bool = False
    state_key: str = ""


class Action(Struct, frozen=True, kw_only=True):
    """What the agent did: its text as sampled, and what was parsed from it.

    `malformed` is empty, or one sentence for the agent on why its tool calls could not be read.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: str = ""


class Transition(Struct, frozen=True, kw_only=True):
    """The environment's answer. `outcome` is its verdict on the episode, 1.0 = success."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    outcome: float = 0.0
    info: dict[str, float] = {}


class Env(Protocol):
    """One episode at a time; `reset` starts a new one. One task at a time awaits its methods."""

    async def reset(self, task: Task, seed: int) -> Observation: ...

    async def step(self, action: Action) -> Transition: ...

    async def close(self) -> None: ...


class EnvFactory(Protocol):
    """Made once per process from `[environment.options]`; wrong options raise ConfigError.

    `tasks` is read on the learner's side only. Tasks come in a fixed order that depends on nothing
    but options, and splits are disjoint.
    """

    def tasks(self, split: Split) -> Sequence[Task]: ...

    def make(self) -> Env: ...


class Demonstrator(Protocol):
    """A factory that can also show how it is played, for a warm start by behaviour cloning."""

    def demonstrate(self, task: Task, seed: int) -> Sequence[tuple[Observation, str]]:
        """Pairs of observation and the assistant's text, in order, for one scripted episode."""
        ...


class Vocabulary(Protocol):
    """A factory of a closed world that can list every word it may show or understand."""

    def words(self) -> Sequence[str]: ...


Options = Mapping[str, JSON]
