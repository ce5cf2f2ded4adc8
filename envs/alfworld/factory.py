"""ALFWorld for a run file: `factory = "capo.envs.alfworld:AlfworldFactory"`."""

import json
from collections.abc import Sequence

from capo.envs.alfworld.env import AlfworldEnv, Episode
from capo.envs.alfworld.games import data_folder, read_games
from capo.envs.alfworld.options import read_options
from capo.envs.alfworld.prompt import TOOL_NAME
from capo.envs.alfworld.tasks import pack, unpack
from capo.envs.api import Action, Observation, Options, Split, ToolCall
from capo.protocol.errors import EnvError
from capo.protocol.records import Task


class AlfworldFactory:
    """Games are read from disk by `tasks` alone; playing and demonstrating need only the task."""

    def __init__(self, options: Options) -> None:
        self._options = read_options(options)

    def tasks(self, split: Split) -> Sequence[Task]:
        options = self._options
        games = read_games(data_folder(options.data), options.folder_of(split), options.families)
        return [pack(split, game) for game in games]

    def make(self) -> AlfworldEnv:
        return AlfworldEnv(self._options)

    def demonstrate(self, task: Task, seed: int) -> Sequence[tuple[Observation, str]]:
        """The game's own walkthrough, as tool calls in Qwen's format; `seed` changes nothing."""
        game = unpack(task)
        episode = Episode(game, self._options)
        shown = []
        won = False
        for command in game.walkthrough:
            call = ToolCall(name=TOOL_NAME, arguments={"command": command})
            text = f"<tool_call>\n{_call_json(call)}\n</tool_call>"
            shown.append((episode.observation, text))
            won = episode.step(Action(text=text, tool_calls=(call,))).terminated
        if not won:
            raise EnvError(f"the walkthrough of the game {game.id} does not win it")
        return shown


def _call_json(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": call.arguments})
