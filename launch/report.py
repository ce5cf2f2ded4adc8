"""`capo report RUN`: what a run came to and where its time went."""

import argparse
from pathlib import Path

from capo.learner.report import report_lines


def command(args: argparse.Namespace) -> int:
    run_dir = Path(args.run)
    print("\n".join(report_lines(run_dir)))
    if args.plot:
        from capo.learner.run_plot import plot_run

        plot_run(run_dir, Path(args.plot))
        print(f"The curves are in {args.plot}.")
    return 0
