"""`capo check CONFIG`: the resolved configuration and what it will need. Starts nothing."""

import argparse

from capo.configs import algorithms
from capo.configs.load import load
from capo.configs.toml import toml_lines
from capo.launch.plan import plan_lines


def command(args: argparse.Namespace) -> int:
    config = load(args.config, args.overrides)
    print("\n".join(toml_lines(config)))
    print("\n# algorithm")
    print("\n".join(f"#   {line}" for line in algorithms.describe(config.algorithm)))
    print("\n# plan")
    print("\n".join(f"#   {line}" for line in plan_lines(config)))
    return 0
