"""Any Gymnasium environment for a run file: `factory = "capo.envs.gymnasium:GymnasiumFactory"`.

A task is a seed of `reset`. The agent reads observations as text and answers with the action.
"""

from collections.abc import Sequence
from typing import Any, Literal

import gymnasium
from msgspec import Struct

from capo.envs.api import Action, Message, Observation, Options, Split, Transition
from capo.envs.registry import read_options
from capo.envs.space_text import describe, read_action, show, show_rendered
from capo.protocol.errors import ConfigError, EnvError
from capo.protocol.records import Task

_SPLIT_SEEDS = 10_000_000  # of each split; disjoint
_FIRST_SEED: dict[Split, int] = {"train": 0, "valid": _SPLIT_SEEDS, "test": 2 * _SPLIT_SEEDS}


class GymnasiumOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`id` is `gymnasium.make`'s, also as "module:Name-v0" for one that a module registers."""

    id: str
    arguments: dict[str, Any] = {}  # of gymnasium.make
    instructions: str = ""  # for the agent, before the first observation
    shown: Literal["observation", "render"] = "observation"  # render: what render_mode "ansi" gives
    action_names: tuple[str, ...] = ()  # of a Discrete space, in order; otherwise numbers
    max_turns: int = 100  # answers in all, also those that are no action
    invalid_penalty: float = 0.0  # subtracted for an answer that is no action
    success_info: str = ""  # what of `info` says at the end that it is solved; cut off without: not
    success_return: float = 0.0  # without success_info: solved is a return above this
    train_tasks: int = 10_000
    valid_tasks: int = 200
    test_tasks: int = 200


class GymnasiumEnv:
    """One episode at a time. Its methods block, so an actor runs it in a thread of its own."""

    def __init__(self, options: GymnasiumOptions) -> None:
        self._options = options
        arguments = dict(options.arguments)
        if options.shown == "render":
            arguments.setdefault("render_mode", "ansi")
        self._env: gymnasium.Env[Any, Any] = gymnasium.make(options.id, **arguments)
        self._space = self._env.action_space
        try:
            self._what_to_say = describe(self._space, options.action_names)
            self._require_text_rendering()
        except ValueError as error:
            self.close()
            raise ConfigError(f"environment.options: {options.id}: {error}") from error
        self._turns = 0
        self._return = 0.0
        self._info: dict[str, Any] = {}  # what the last step that was an action said
        self._state = ""  # as it was last shown

    def reset(self, task: Task, seed: int) -> Observation:
        """All members of a group begin alike, and meet the same chance, by the task's seed;
        `seed` changes nothing."""
        observation, self._info = self._env.reset(seed=int(task.payload))
        self._turns, self._return = 0, 0.0
        system = "\n".join(filter(None, (self._options.instructions, self._what_to_say)))
        self._state = self._shown(observation)
        return self._observe(self._state, Message("system", system))

    def step(self, action: Action) -> Transition:
        """An answer that is no action costs a turn and leaves the environment as it is."""
        self._turns += 1
        late = self._turns >= self._options.max_turns
        try:
            chosen = read_action(self._space, action.text, self._options.action_names)
        except ValueError as error:
            return Transition(
                observation=self._observe(f"{error} {self._what_to_say}"),
                reward=0.0 - self._options.invalid_penalty,
                terminated=False,
                truncated=late,
                outcome=float(late and self._solved(terminated=False)),
                info={"invalid": 1.0},
            )
        observation, reward, terminated, truncated, self._info = self._env.step(chosen)
        self._return += float(reward)
        self._state = self._shown(observation)
        ended = terminated or truncated or late
        return Transition(
            observation=self._observe(self._state),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated or late) and not terminated,
            outcome=float(ended and self._solved(terminated=bool(terminated))),
            info={"invalid": 0.0},
        )

    def close(self) -> None:
        self._env.close()

    def _solved(self, *, terminated: bool) -> bool:
        """An environment that was cut off may not know that this was the end."""
        key, info = self._options.success_info, self._info
        if not key:
            return self._return > self._options.success_return
        if terminated and key not in info:
            raise EnvError(
                f"{self._options.id} ended without {key!r} in its info, which has "
                f"{', '.join(map(str, info)) or 'nothing'}; see environment.options.success_info"
            )
        return bool(info.get(key, False))

    def _require_text_rendering(self) -> None:
        mode, modes = self._env.render_mode, self._env.metadata.get("render_modes", [])
        if self._options.shown == "render" and (mode is None or mode not in modes):
            raise ValueError(
                f"it cannot render in mode {mode!r}, only in {list(modes)}; set shown = "
                '"observation"'
            )

    def _shown(self, observation: Any) -> str:
        if self._options.shown == "observation":
            return show(observation)
        rendered = self._env.render()
        if not isinstance(rendered, str):
            raise EnvError(f'{self._options.id} renders no text; set shown = "observation"')
        return show_rendered(rendered)

    def _observe(self, text: str, *before: Message) -> Observation:
        return Observation(messages=(*before, Message("user", text)), state_key=self._state)


class GymnasiumFactory:
    """Makes one environment at once, so that wrong options are told before a run begins."""

    def __init__(self, options: Options) -> None:
        self._options = read_options(options, GymnasiumOptions)
        if self._options.max_turns < 1:
            raise ConfigError(
                f"environment.options.max_turns must be positive, got {self._options.max_turns}"
            )
        for split in _FIRST_SEED:
            number = self._num_tasks(split)
            if not 0 <= number <= _SPLIT_SEEDS:
                raise ConfigError(
                    f"environment.options.{split}_tasks is {number}; it must be from 0 to "
                    f"{_SPLIT_SEEDS}"
                )
        self.make().close()

    def tasks(self, split: Split) -> Sequence[Task]:
        first = _FIRST_SEED[split]
        return [
            Task(id=f"{split}-{number}", payload=str(first + number).encode())
            for number in range(self._num_tasks(split))
        ]

    def make(self) -> GymnasiumEnv:
        return GymnasiumEnv(self._options)

    def _num_tasks(self, split: Split) -> int:
        options = self._options
        return {
            "train": options.train_tasks,
            "valid": options.valid_tasks,
            "test": options.test_tasks,
        }[split]
