"""`capo export RUN`: a run's episodes as JSON lines, to a file or to standard output."""

import argparse
import sys
from pathlib import Path
from typing import BinaryIO

from capo.learner.run_export import export_lines
from capo.protocol.errors import ConfigError


def command(args: argparse.Namespace) -> int:
    lines = export_lines(Path(args.run))
    first = next(lines, None)  # a run that cannot be read is refused before a file is made
    output = sys.stdout.buffer if args.output == "-" else _create(Path(args.output))
    count = 0
    while first is not None:
        output.write(first + b"\n")
        count += 1
        first = next(lines, None)
    output.flush()
    if args.output != "-":
        output.close()
        print(f"{count} episodes are in {args.output}.")
    return 0


def _create(path: Path) -> BinaryIO:
    try:
        return path.open("xb")
    except FileExistsError as error:
        raise ConfigError(f"{path} exists; choose another name or remove it.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
