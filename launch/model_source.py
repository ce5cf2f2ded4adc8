"""Where a run's policy comes from, in two steps: its description at once, its weights when ready.

Actors need only the description (config.json and tokenizer), so their engines start while a warm
start still goes on. The weights end up in the run's own folder, so a replay needs nothing else.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from capo.configs.algorithms import needs_critic
from capo.configs.schema import RunConfig
from capo.envs.api import EnvFactory
from capo.launch.warm_start import build_initial, starting_policy
from capo.learner.model_files import require_whole_model
from capo.protocol.errors import ConfigError

Report = Callable[[str], None]
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def local_folder(path: str) -> Path:
    """A folder as it is; any other name is a model of the Hugging Face hub.

    Raises:
        ConfigError: there is no such folder, and the hub does not give such a model.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=list(HUB_FILES)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.path {path!r} is no folder here, and the Hugging Face hub gave nothing of that "
            f"name ({reason})"
        ) from error


class ModelSource:
    """`folder` is the run's copy of its starting policy; made by `weights`, kept on resume."""

    def __init__(self, config: RunConfig, factory: EnvFactory, folder: Path) -> None:
        self._config = config
        self._factory = factory
        self._folder = folder

    def description(self) -> Path:
        """A folder with config.json and the tokenizer's files. Takes about a second.

        Raises ConfigError if a model that is there already, the critic's included, is damaged.
        """
        if self._config.model.critic_path and needs_critic(self._config.algorithm):
            require_whole_model(Path(self._config.model.critic_path))
        if self._folder.is_dir():
            require_whole_model(self._folder)
            return self._folder
        if self._config.model.tiny is None:
            given = local_folder(self._config.model.path)
            require_whole_model(given)
            return given
        initial = self._folder.with_name("description")
        build_initial(self._config, self._factory, initial)
        return initial

    def weights(self, report: Report) -> Path:
        """The starting policy in the run's folder, complete or not there at all."""
        if not self._folder.is_dir():
            tiny, path = self._config.model.tiny, self._config.model.path
            policy = starting_policy(self._config, report) if tiny else local_folder(path)
            if tiny:  # it may come from the cache
                require_whole_model(policy, f"remove {policy} and it is built again")
            beside = self._folder.with_suffix(".tmp")
            shutil.rmtree(beside, ignore_errors=True)
            shutil.copytree(policy, beside)
            beside.rename(self._folder)
            shutil.rmtree(self._folder.with_name("description"), ignore_errors=True)
        return self._folder
