"""`capo eval RUN`: held-out games with a checkpoint of a run, sampled and greedy. Trains nothing.

It is a run of its own without updates, in RUN/evaluations, so what was played can be looked at.
"""

import argparse
import time
from pathlib import Path

import msgspec

from capo.configs.algorithms import resolve
from capo.configs.schema import RunConfig
from capo.configs.toml import toml_lines
from capo.launch.outcome import OUTCOME_COLUMNS, evaluations_of, outcome_rows
from capo.launch.processes import free_port
from capo.launch.run import supervise
from capo.launch.run_directory import config_of
from capo.learner.checkpoint import Checkpoints
from capo.learner.run_reader import RunReader
from capo.learner.text_table import text_table
from capo.protocol.errors import ConfigError
from capo.protocol.sayings import plain

DEFAULT_GAMES = 100  # of a run that evaluated nothing itself


def command(args: argparse.Namespace) -> int:
    run_dir = Path(args.run)
    trained = config_of(run_dir)
    checkpoints = Checkpoints(run_dir, trained.checkpoint.keep_last)
    checkpoint = checkpoints.latest() if args.update is None else checkpoints.open(args.update)
    if args.games is not None and args.games < 1:
        raise ConfigError(f"--games must be positive, got {args.games}.")
    for sentence in checkpoint.refused if checkpoint else ():
        print(plain(sentence), flush=True)
    if checkpoint is None:
        raise ConfigError(
            f"{run_dir} has no checkpoint yet; it is written after the first updates."
        )
    games = args.games or trained.evaluation.games or DEFAULT_GAMES
    stamp = time.strftime("%Y%m%d-%H%M%S")
    evaluation_dir = run_dir / "evaluations" / f"version-{checkpoint.version:06d}-{stamp}"
    address = f"tcp://127.0.0.1:{free_port()}"
    config = evaluation_config(
        trained, checkpoint.folder / "policy", evaluation_dir, address, games
    )
    evaluation_dir.parent.mkdir(parents=True, exist_ok=True)
    file = evaluation_dir.with_suffix(".toml")
    file.write_text("\n".join(toml_lines(config)) + "\n", encoding="utf-8")
    print(f"Playing {games} games with version {checkpoint.version} of {run_dir} ...", flush=True)
    log = evaluation_dir.with_suffix(".log")
    code = supervise(
        evaluation_dir, config, ["learner", str(file)], address, config.actors, learner_log=log
    )
    if code:
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        print(
            "\n".join([*map(plain, said), f"The evaluation failed; its log is {log}."]), flush=True
        )
        return code
    with RunReader(evaluation_dir) as reader:
        [(_, results)] = evaluations_of(reader)
    print("\n".join(text_table(OUTCOME_COLUMNS, outcome_rows([(checkpoint.version, results)]))))
    return 0


def evaluation_config(
    trained: RunConfig, policy: Path, evaluation_dir: Path, address: str, games: int
) -> RunConfig:
    """The trained run's configuration with the checkpoint as its model, and nothing to train."""
    replace = msgspec.structs.replace
    return replace(
        trained,
        run_dir=str(evaluation_dir),
        updates=0,
        model=replace(trained.model, path=str(policy), tiny=None, critic_path=""),
        warm_start=None,
        # Nothing is trained, so nothing but the policy need be loaded.
        algorithm=resolve({"preset": "rloo", "kl_coefficient": 0.0}),
        learner=replace(trained.learner, batch_episodes=2, minibatches=1, ranks=1),
        scheduler=replace(trained.scheduler, group_size=2),
        evaluation=replace(trained.evaluation, games=games, before=True, after=False, every=0),
        network=replace(trained.network, bind=address),
        actors=max(1, trained.actors),
    )
