"""`capo keygen FOLDER`: CURVE keys for a learner and its actors."""

import argparse
from pathlib import Path

from capo.protocol.keys import generate


def command(args: argparse.Namespace) -> int:
    for file in generate(Path(args.folder), num_actors=args.actors):
        print(file)
    return 0
