"""The configuration of a run that goes on: as recorded, with the few changes that are allowed."""

from collections.abc import Sequence
from pathlib import Path

from capo.configs.load import apply_override, from_raw, to_raw
from capo.configs.schema import RunConfig
from capo.launch.run_directory import config_of
from capo.protocol.errors import ConfigError

MAY_CHANGE = ("network.", "checkpoint.", "updates=", "actors=", "run_dir=")


def resumed_config(run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    """Raises ConfigError for an override that would make it another run."""
    raw = to_raw(config_of(run_dir))
    for assignment in overrides:
        if not assignment.startswith(MAY_CHANGE):
            raise ConfigError(
                f"--set {assignment} would change a run that has begun; with --resume only "
                "network, checkpoint, updates and actors may change."
            )
        apply_override(raw, assignment)
    return from_raw(raw, str(run_dir))
