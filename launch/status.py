"""`capo status RUN`: who waits for whom, and since when; or that no learner is at work there."""

import argparse
import fcntl
from pathlib import Path

from capo.learner.run_reader import RunReader
from capo.learner.status_file import read_status, status_lines


def command(args: argparse.Namespace) -> int:
    run_dir = Path(args.run)
    with RunReader(run_dir) as reader:
        done = sum(update.status == "done" for update in reader.updates())
        total = reader.config().updates
    if learner_is_running(run_dir):
        print("\n".join(status_lines(read_status(run_dir))))
    elif done >= total:
        print(f"The run is complete: {done} updates. Look at it with: capo report {run_dir}")
    else:
        print(
            f"No learner is at work in {run_dir}: {done} of {total} updates are done. Go on with: "
            f"capo run --resume {run_dir}"
        )
    return 0


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
