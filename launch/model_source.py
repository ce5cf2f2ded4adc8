"""Where a run's policy comes from, in two steps: its description at once, its weights when ready.

Actors need only the description (config.json and tokenizer), so their engines start while a warm
start still goes on. The weights end up in the run's own folder, so a replay needs nothing else.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from capo.configs.schema import RunConfig
from capo.envs.api import EnvFactory
from capo.launch.warm_start import build_initial, starting_policy

Report = Callable[[str], None]


class ModelSource:
    """`folder` is the run's copy of its starting policy; made by `weights`, kept on resume."""

    def __init__(self, config: RunConfig, factory: EnvFactory, folder: Path) -> None:
        self._config = config
        self._factory = factory
        self._folder = folder

    def description(self) -> Path:
        """A folder with config.json and the tokenizer's files. Takes about a second."""
        if self._folder.is_dir():
            return self._folder
        if self._config.model.tiny is None:
            return Path(self._config.model.path)
        initial = self._folder.with_name("description")
        build_initial(self._config, self._factory, initial)
        return initial

    def weights(self, report: Report) -> Path:
        """The starting policy in the run's folder, complete or not there at all."""
        if not self._folder.is_dir():
            policy = starting_policy(self._config, report)
            beside = self._folder.with_suffix(".tmp")
            shutil.rmtree(beside, ignore_errors=True)
            shutil.copytree(policy, beside)
            beside.rename(self._folder)
            shutil.rmtree(self._folder.with_name("description"), ignore_errors=True)
        return self._folder
