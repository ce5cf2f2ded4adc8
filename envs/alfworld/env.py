"""One episode of a game, at the level of complete actions: what is shown, counted and rewarded."""

from capo.envs.alfworld import prompt
from capo.envs.alfworld.games import Game
from capo.envs.alfworld.options import AlfworldOptions
from capo.envs.alfworld.tasks import unpack
from capo.envs.alfworld.world import World
from capo.envs.api import Action, Observation, Transition
from capo.protocol.errors import EnvError
from capo.protocol.records import Task


class Episode:
    """A game being played. `observation` is what the agent sees now."""

    def __init__(self, game: Game, options: AlfworldOptions) -> None:
        try:
            self._world = World(game.problem, game.task)
        except EnvError as error:
            raise EnvError(f"the game {game.id} cannot be played: {error}") from error
        self._task = game.task
        self._options = options
        self._seen = self._world.introduction
        self._done: list[str] = []
        self._steps = 0
        self.observation = self._show("")

    def step(self, action: Action) -> Transition:
        """An answer that cannot be read costs a step and leaves the world as it is."""
        options = self._options
        command, feedback = prompt.read_command(action, self._world.commands)
        self._steps += 1
        if feedback:
            reward = -options.invalid_penalty
        else:
            self._seen = self._world.step(command)
            self._done.append(command)
            reward = options.format_reward
        won = self._world.won
        self.observation = self._show(feedback)
        return Transition(
            observation=self.observation,
            reward=reward + (options.success_reward if won else 0.0),
            terminated=won,
            truncated=not won and self._steps >= options.max_steps,
            outcome=float(won),
            info={"valid_action": float(not feedback)},
        )

    def _show(self, feedback: str) -> Observation:
        history = self._options.history
        return Observation(
            messages=prompt.messages(
                task=self._task,
                observation=self._seen,
                commands=self._world.commands,
                recent=self._done[-history:] if history else (),
                feedback=feedback,
            ),
            tools=(prompt.TOOL,),
            rebuilt=True,
            state_key=self._world.state_key,
        )


class AlfworldEnv:
    """The async face. A step takes under a millisecond and a reset a few, so nothing blocks."""

    def __init__(self, options: AlfworldOptions) -> None:
        self._options = options
        self._episode: Episode | None = None

    async def reset(self, task: Task, seed: int) -> Observation:
        """Games are deterministic: `seed` changes nothing."""
        self._episode = Episode(unpack(task), self._options)
        return self._episode.observation

    async def step(self, action: Action) -> Transition:
        if self._episode is None:
            raise EnvError("step was called before reset")
        return self._episode.step(action)

    async def close(self) -> None:
        self._episode = None
