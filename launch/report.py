"""`capo report RUN`: what a run came to and where its time went."""

import argparse
from pathlib import Path

from capo.learner.report import report_lines
from capo.protocol.sayings import plain


def command(args: argparse.Namespace) -> int:
    run_dir = Path(args.run)
    lines = list(report_lines(run_dir))
    if args.plot:
        from capo.learner.run_plot import plot_run

        plot_run(run_dir, Path(args.plot))
        lines.append(f"The curves are in {args.plot}.")
    print("\n".join(plain(line) for line in lines))
    return 0
