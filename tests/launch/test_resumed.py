"""What may change when a run goes on, and how it is remembered."""

from pathlib import Path

import pytest

from capo.configs.load import load, to_json
from capo.launch.resumed import resumed_config
from capo.learner.run_file import RunFile
from capo.learner.run_reader import RunReader
from capo.protocol.errors import ConfigError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    facts = {"run_id": "r", "config": to_json(load("quickstart")).decode()}
    RunFile.create(tmp_path, facts).close()
    return tmp_path


def test_where_it_listens_and_how_far_it_goes_may_change(run_dir: Path) -> None:
    config = resumed_config(run_dir, ["updates=7", 'network.bind="tcp://127.0.0.1:5555"'])
    assert (config.updates, config.network.bind) == (7, "tcp://127.0.0.1:5555")


@pytest.mark.parametrize("override", ["learner.policy_lr=1", "algorithm=ppo", "seed=3"])
def test_what_makes_it_another_run_may_not(run_dir: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="--resume"):
        resumed_config(run_dir, [override])


def test_every_update_keeps_the_configuration_it_ran_with(run_dir: Path) -> None:
    longer = resumed_config(run_dir, ["updates=999"])
    run_file = RunFile.open(run_dir)
    run_file.set_facts({"config@150": to_json(longer).decode()})
    run_file.close()
    with RunReader(run_dir) as reader:
        assert reader.config(149) == load("quickstart")
        assert reader.config(150) == reader.config() == longer
