"""`capo status RUN`: who waits for whom, and since when."""

import argparse
from pathlib import Path

from capo.learner.status_file import read_status, status_lines


def command(args: argparse.Namespace) -> int:
    print("\n".join(status_lines(read_status(Path(args.run)))))
    return 0
