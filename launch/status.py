"""`capo status RUN|ADDRESS`: who waits for whom, and since when; or that no learner is at work.

A run's folder holds what its learner wrote last, an address asks the learner itself.
"""

import argparse
import fcntl
from pathlib import Path

import msgspec

from capo.launch.address import check_address, keys_for
from capo.learner.run_reader import RunReader
from capo.learner.status_file import LearnerStatus, read_status, status_lines
from capo.protocol.errors import CapoError, ConfigError
from capo.protocol.status_query import ask_status


def command(args: argparse.Namespace) -> int:
    if "://" in args.run:
        _print_status_of(args.run, args.keys, args.insecure)
        return 0
    if args.keys or args.insecure:
        raise ConfigError(f"--keys and --insecure are for an address, and {args.run!r} is none.")
    run_dir = Path(args.run)
    with RunReader(run_dir) as reader:
        done = sum(update.status == "done" for update in reader.updates())
        config, evaluations = reader.config(), reader.evaluations()
    trained = done >= config.updates
    evaluated = not (config.evaluation.after and config.evaluation.games) or any(
        row.version == done and row.finished_at is not None for row in evaluations
    )
    if learner_is_running(run_dir):
        print("\n".join(status_lines(read_status(run_dir))))
    elif trained and evaluated:
        print(f"The run is complete: {done} updates. Look at it with: capo report {run_dir}")
    else:
        but = ", the last evaluation is not" if trained else ""
        print(
            f"No learner is at work in {run_dir}: {done} of {config.updates} updates are done{but}."
            f" Go on with: capo run --resume {run_dir}"
        )
    return 0


def _print_status_of(address: str, key_file: str, insecure: bool) -> None:
    check_address(address)
    answer = ask_status(address, keys_for(address, key_file, insecure))
    try:
        status = msgspec.json.decode(answer, type=LearnerStatus)
    except msgspec.DecodeError as error:
        raise CapoError(
            f"the learner at {address} tells its status in another form ({error}); use the "
            "capo-rl version that it runs."
        ) from None
    print("\n".join(status_lines(status, now=status.written_at)))  # clocks may differ


def learner_is_running(run_dir: Path) -> bool:
    """Whether a process holds the run's lock; it falls with its process, however that ends."""
    try:
        with (run_dir / "run.lock").open() as held:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
