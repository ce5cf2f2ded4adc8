"""Any update of a run again, from the run file and the checkpoint before it alone.

No engine, no environment, no network: recorded episodes go through the same trainer, so on the same
kind of machine the same bits come out. With overrides it answers "what if": the updates before are
repeated as they were, and the one in question with the changed configuration.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from capo.configs.load import InvalidConfigError, apply_override, from_raw, to_raw
from capo.configs.schema import RunConfig
from capo.learner import results
from capo.learner.checkpoint import Checkpoints
from capo.learner.lead import Lead, open_trainer
from capo.learner.model_files import require_whole_model
from capo.learner.orders import Orders
from capo.learner.replay_record import Replayed
from capo.learner.run_database import damaged
from capo.learner.run_reader import RunReader
from capo.learner.trainer import Trainer
from capo.protocol.errors import CheckpointError, ConfigError, RunFileError

FIXED = ("learner.batch_episodes", "learner.ranks", "learner.zero_stage")
MODEL_FOLDER = "model"  # the run's copy of the policy it started from


def replay(
    run_dir: Path,
    version: int,
    overrides: Sequence[str] = (),
    note: Callable[[str], None] = lambda text: None,
    orders: Orders | None = None,
) -> Replayed:
    """Repeat the update that started from policy `version`; `note` is told about progress; `orders`
    lead as many ranks as the run had.

    Raises RunFileError if that update is not recorded or its record is damaged, CheckpointError if
    the run's folder lacks the weights it started from, ConfigError if these are damaged, or for an
    override that cannot change an update.
    """
    with RunReader(run_dir) as reader:
        recorded = _recorded(reader, version)
        recorded_config = reader.config(version)
        wanted = overridden(recorded_config, overrides) if overrides else recorded_config
        trainer, config = _trainer_before(run_dir, reader, version, note, orders)
        started_from = trainer.version
        diverged_at = None
        for other in range(started_from, version):
            note(f"Repeating update {other} on the way to {version}.")
            if reader.config(other) != config:
                config = reader.config(other)
                trainer = _with_config(trainer, config, run_dir / MODEL_FOLDER, orders)
            before = _recorded(reader, other)
            again = _repeat(trainer, reader, before)
            if diverged_at is None and results.compare(before, again):
                diverged_at = other
        if wanted != config:
            trainer = _with_config(trainer, wanted, run_dir / MODEL_FOLDER, orders)
        note(f"Repeating update {version}.")
        replayed = _repeat(trainer, reader, recorded)
    return Replayed(
        version=version,
        started_from=started_from,
        overrides=tuple(overrides),
        recorded=recorded,
        replayed=replayed,
        differences=tuple(results.compare(recorded, replayed)),
        diverged_at=diverged_at,
    )


def _recorded(reader: RunReader, version: int) -> results.UpdateResult:
    try:
        recorded = results.decode(reader.update_result(version))
    except (ValueError, TypeError) as error:
        raise damaged(reader.path, f"the result of update {version}: {error}") from error
    if recorded.version != version:
        raise damaged(reader.path, f"update {version} has the result of {recorded.version}")
    return recorded


def _repeat(
    trainer: Trainer | Lead, reader: RunReader, recorded: results.UpdateResult
) -> results.UpdateResult:
    episodes = reader.read_episodes(recorded.episode_ids, trainer.vocabulary_size)
    try:
        return trainer.update(episodes, recorded.version)
    except ValueError as error:
        raise RunFileError(
            f"Update {recorded.version} of {reader.path} cannot be computed: {error}."
        ) from error


def overridden(config: RunConfig, assignments: Sequence[str]) -> RunConfig:
    """The configuration with `algorithm.*` and `learner.*` values changed, all rules applied.

    Raises ConfigError for any other key, and for what the rules forbid.
    """
    raw = to_raw(config)
    for assignment in assignments:
        key, _, value = assignment.partition("=")
        if not key.startswith(("algorithm", "learner.")) or key in FIXED:
            raise ConfigError(
                f"--set {assignment}: replay takes keys of [algorithm] and [learner], without "
                "batch_episodes, ranks and zero_stage: the batch is the recorded one, and so is "
                "the optimizers' state in the checkpoint."
            )
        if key in ("algorithm", "algorithm.preset"):  # else the recorded keys would outweigh it
            raw["algorithm"] = {"preset": value.strip()}
        else:
            apply_override(raw, assignment)
    try:
        return from_raw(raw, "the recorded configuration")
    except InvalidConfigError as error:
        raise ConfigError(str(error)) from error


def _trainer_before(
    run_dir: Path,
    reader: RunReader,
    version: int,
    note: Callable[[str], None],
    orders: Orders | None,
) -> tuple[Trainer | Lead, RunConfig]:
    """A trainer at the nearest version before, and the configuration it has."""
    model = run_dir / MODEL_FOLDER
    if not model.is_dir():
        raise CheckpointError(
            f"{run_dir} lacks the folder {MODEL_FOLDER}, the policy that the run started from: "
            f"take the whole folder of the run along."
        )
    require_whole_model(model)
    keep_last = reader.config().checkpoint.keep_last
    checkpoint = Checkpoints(run_dir, keep_last).nearest_before(version)
    config = reader.config(checkpoint.version if checkpoint else 0)
    trainer = open_trainer(config, model, orders)
    if checkpoint is None:
        note("No checkpoint lies before that update: starting from the run's first policy.")
        return trainer, config
    for sentence in checkpoint.refused:
        note(sentence)
    trainer.load(checkpoint.folder)
    return trainer, config


def _with_config(
    trainer: Trainer | Lead, config: RunConfig, model: Path, orders: Orders | None
) -> Trainer | Lead:
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(Path(folder))
        other = open_trainer(config, model, orders)
        other.load(Path(folder))
    return other
