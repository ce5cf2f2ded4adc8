"""`capo check CONFIG`: the resolved configuration and what it will need. Starts nothing."""

import argparse
from pathlib import Path

from capo.configs.algorithm_text import algorithm_lines
from capo.configs.load import load
from capo.configs.schema import RunConfig
from capo.configs.toml import toml_lines
from capo.envs.registry import load_factory
from capo.launch.plan import plan_lines
from capo.protocol.keys import check_bind, load_learner_keys


def command(args: argparse.Namespace) -> int:
    config = load(args.config, args.overrides)
    network = config.network
    keys = load_learner_keys(Path(network.key_file)) if network.key_file else None
    check_bind(network.bind, keys, network.insecure)
    if config.environment.factory.startswith("capo.envs."):  # others may import what they like
        check_options(config)
    print("\n".join(toml_lines(config)))
    print("\n# algorithm")
    print("\n".join(f"#   {line}" for line in algorithm_lines(config.algorithm)))
    print("\n# plan")
    print("\n".join(f"#   {line}" for line in plan_lines(config)))
    return 0


def check_options(config: RunConfig) -> None:
    """Refuse wrong [environment.options]; games that are not on this machine are no fault here."""
    environment = config.environment
    load_factory(environment.factory, environment.options)
