"""ALFWorld's household games, played by an engine in pure Python that needs no TextWorld.

The files, in the order in which they use each other: `problem` reads PDDL, `goal` grounds the
goal, `house` is what never changes, `text` the sentences, `world` the state and its rules; `games`
finds games on disk, `tasks` packs them, `options` says how they are played, `prompt` words them for
an agent, `env` plays, `factory` offers it all to a run.
"""

from capo.envs.alfworld.factory import AlfworldFactory

__all__ = ["AlfworldFactory"]
