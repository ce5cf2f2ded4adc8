"""`capo keygen FOLDER`: CURVE keys for a learner and its actors."""

import argparse
from pathlib import Path

from capo.protocol.keys import add_actor, generate


def command(args: argparse.Namespace) -> int:
    if args.add:
        print(
            f"actor:   capo actor --connect ADDRESS --keys {add_actor(Path(args.folder), args.add)}"
        )
        print("The learner admits it from its next start.")
        return 0
    names = [f"actor-{index}" for index in range(args.actors)]
    files = generate(Path(args.folder), actors=names)
    print(f"learner: network.key_file = {str(files[0])!r}")
    for file in files[1:]:
        print(f"actor:   capo actor --connect ADDRESS --keys {file}")
    return 0
