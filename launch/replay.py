"""`capo replay RUN`: the updates of a run, or one of them again, offline and bit for bit."""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from capo.launch import libraries
from capo.launch.exit_codes import EXIT_FAILURE
from capo.launch.rank import rank_of_environment, serve
from capo.learner.run_reader import RunReader
from capo.learner.text_table import text_table
from capo.protocol.errors import ConfigError
from capo.protocol.sayings import plain

EXIT_DIFFERENT = 1


def command(args: argparse.Namespace) -> int:
    if rank_of_environment() > 0:  # a launcher started all ranks alike
        return serve()
    run_dir = Path(args.run)
    if args.update is None:
        if args.overrides:
            raise ConfigError("--set asks what would have changed in one update: add --update K.")
        print("\n".join(plain(line) for line in list_updates(run_dir)))
        return 0
    with RunReader(run_dir) as reader:  # a run that cannot be read is refused before torch loads
        reader.update_result(args.update)
        config = reader.config(args.update)
    libraries.prepare()
    from capo.launch.rank_processes import all_ranks
    from capo.learner.replay import overridden, replay
    from capo.learner.replay_text import replay_lines

    if args.overrides:  # a wrong one is refused before ranks start
        overridden(config, args.overrides)
    with all_ranks(config.learner.ranks, None, _rank_lost) as crew:
        replayed = replay(run_dir, args.update, args.overrides, _note, crew.lead())
    print("\n".join(plain(line) for line in replay_lines(replayed)))
    went_astray = replayed.diverged_at is not None
    differs = bool(replayed.differences) and not args.overrides
    return EXIT_DIFFERENT if went_astray or differs else 0


def _note(text: str) -> None:
    print(plain(text), file=sys.stderr, flush=True)


def _rank_lost(sentence: str) -> None:
    for line in f"capo replay: {sentence}".splitlines():
        _note(line)
    os._exit(EXIT_FAILURE)


def list_updates(run_dir: Path) -> Iterator[str]:
    """One row per update; the version is that of the policy it started from."""
    with RunReader(run_dir) as reader:
        updates = reader.updates()
    header = ("update", "status", "episodes", "success", "out of range", "KL", "grad norm")
    names = ("batch/outcome", "ratio/out_of_range", "policy/kl", "policy/grad_norm")
    rows = [
        (
            str(update.version),
            update.status,
            str(len(update.episode_ids)),
            *(f"{update.metrics[name]:.4g}" if name in update.metrics else "" for name in names),
        )
        for update in updates
    ]
    yield from text_table(header, rows)
    if not rows:
        yield f"{run_dir} has no update yet."
