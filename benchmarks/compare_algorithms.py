"""Algorithms against each other on the household world, by the real command, told as it came out.

    python -m benchmarks.compare_algorithms [--output runs/comparison] [--seeds 0 1 2]

Every algorithm trains from the same warm start (cloned once per seed, kept in the cache) on equally
many episodes; one run after the other, each a `capo run`. What is finished is skipped and what was
interrupted goes on, so the command can be stopped and given again. Writes OUTPUT/comparison.md,
.png (learning curves) and .json. The learning rates are the configuration's, which were found with
CAPO; so is its clip, which GSPO, having one ratio per action too, is given as well; the others have
their presets'. So this is a check that all of it learns, not a ranking.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks import _plots
from benchmarks._comparison import Run, draw, is_finished, read_run, table
from capo.configs.load import InvalidConfigError, load
from capo.configs.schema import RunConfig
from capo.launch.run_directory import config_of
from capo.protocol.errors import CapoError

ALGORITHMS = ("capo", "ppo", "grpo", "gspo", "gigpo", "st_ppo")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", default="configs/quickstart.toml")
    parser.add_argument("--output", type=Path, default=Path("runs/comparison"))
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE",
        help="for all runs, as in updates=50",
    )  # fmt: skip
    parser.add_argument(
        "--report-only", action="store_true", help="start nothing, report what is finished"
    )
    arguments = parser.parse_args()
    config, overrides = arguments.config, arguments.overrides
    try:
        wanted = [
            (
                arguments.output / f"{algorithm}-s{seed}",
                settings(algorithm, seed, config, overrides),
            )
            for seed in arguments.seeds
            for algorithm in arguments.algorithms
        ]
        check(wanted, config)
    except (CapoError, InvalidConfigError, ValueError) as error:
        parser.error(str(error))
    failed = []
    if not arguments.report_only:
        arguments.output.mkdir(parents=True, exist_ok=True)
        failed = [run_dir for run_dir, changes in wanted if not play(run_dir, changes, arguments)]
    runs = [read_run(run_dir) for run_dir, _ in in_order(wanted) if exists_finished(run_dir)]
    if runs:
        report(runs, arguments.output)
    for run_dir in failed:
        print(f"{run_dir.name} failed; its output is {log_of(run_dir)}", file=sys.stderr)
    if not runs:
        print("no run is finished yet", file=sys.stderr)
    return 1 if failed or not runs else 0


def settings(algorithm: str, seed: int, config: str, overrides: Sequence[str]) -> list[str]:
    """All `--set` of one run. The turn limit belongs to the household's task, for everybody."""
    own = [f"algorithm={algorithm}", "algorithm.bootstrap_truncated=false"]
    tuned = load(config).algorithm
    if algorithm == tuned.preset:
        own = []
    elif algorithm == "gspo":
        own += [f"algorithm.clip_low={tuned.clip_low}", f"algorithm.clip_high={tuned.clip_high}"]
    return [*own, f"seed={seed}", "evaluation.before=true", "evaluation.after=true", *overrides]


def check(wanted: Sequence[tuple[Path, Sequence[str]]], config: str) -> None:
    """Before hours are spent: every configuration is valid, and what is there already is of it.

    Raises InvalidConfigError, RunFileError, or ValueError for a run of another configuration.
    """
    for run_dir, changes in wanted:
        planned = _comparable(load(config, changes))
        if (run_dir / "run.sqlite").exists() and _comparable(config_of(run_dir)) != planned:
            raise ValueError(
                f"{run_dir} holds a run of another configuration; choose another --output, or"
                " remove it"
            )


def play(run_dir: Path, changes: Sequence[str], arguments: argparse.Namespace) -> bool:
    """Start, go on with or skip one run. False: it failed."""
    if exists_finished(run_dir):
        print(f"{run_dir.name}: finished already", flush=True)
        return True
    command = [sys.executable, "-m", "capo.launch.main", "run"]
    if (run_dir / "run.sqlite").exists():
        command += ["--resume", str(run_dir)]
    else:
        command.append(arguments.config)
        for change in [*changes, f'run_dir="{run_dir}"']:
            command += ["--set", change]
    print(f"{run_dir.name}: running, output in {log_of(run_dir)}", flush=True)
    with log_of(run_dir).open("ab") as log:
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        code = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False
        ).returncode
    if code == 130:
        raise KeyboardInterrupt
    return code == 0 and exists_finished(run_dir)


def report(runs: Sequence[Run], output: Path) -> None:
    text = table(runs)
    output.mkdir(parents=True, exist_ok=True)
    (output / "comparison.md").write_text(text, encoding="utf-8")
    print(text)
    _plots.save(output, "comparison", draw(runs), list(runs))


def in_order(
    wanted: Sequence[tuple[Path, Sequence[str]]],
) -> list[tuple[Path, Sequence[str]]]:
    """Algorithm by algorithm, in the order asked for; they are played seed by seed."""
    names = list(dict.fromkeys(run_dir.name.rpartition("-s")[0] for run_dir, _ in wanted))
    return sorted(wanted, key=lambda one: names.index(one[0].name.rpartition("-s")[0]))


def exists_finished(run_dir: Path) -> bool:
    return (run_dir / "run.sqlite").exists() and is_finished(run_dir)


def log_of(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.log")


def _comparable(config: RunConfig) -> RunConfig:
    """Without what says only where the run lies and listens."""
    blank = msgspec.structs.replace(config.network, bind="")
    return msgspec.structs.replace(config, run_dir="", network=blank)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
