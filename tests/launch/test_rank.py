"""What the environment says of a process among ranks, whoever set it."""

import os
import subprocess
import sys

import pytest

from capo.launch.rank import LEADER_PID, launched, rank_of_environment
from capo.launch.rank_processes import all_ranks
from capo.learner.ranks import join
from capo.protocol.errors import ConfigError


@pytest.fixture
def environment(monkeypatch):
    def put(**variables: str) -> None:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    put()
    return put


@pytest.mark.parametrize("variables", [{}, {"RANK": "3"}, {"WORLD_SIZE": "4"}, {"RANK": ""}])
def test_without_both_variables_no_launcher_is_there(environment, variables):
    environment(**variables)
    assert launched() is None
    assert rank_of_environment() == 0


def test_a_launcher_says_both(environment):
    environment(RANK="2", WORLD_SIZE="4")
    assert launched() == (2, 4)
    assert rank_of_environment() == 2


@pytest.mark.parametrize(
    ("rank", "num_ranks"), [("x", "2"), ("0", ""), ("-1", "2"), ("2", "2"), ("0", "0")]
)
def test_what_no_launcher_sets_is_told(environment, rank, num_ranks):
    environment(RANK=rank, WORLD_SIZE=num_ranks)
    with pytest.raises(ConfigError, match="unset them"):
        rank_of_environment()


def test_a_launcher_of_another_number_of_ranks_is_told(environment):
    environment(RANK="0", WORLD_SIZE="4")
    with (
        pytest.raises(ConfigError, match=r"started 4 rank\(s\), but learner.ranks is 1"),
        all_ranks(1, None, pytest.fail),
    ):
        pass


def test_a_lone_rank_of_a_launcher_needs_no_meeting_place(environment):
    environment(RANK="0", WORLD_SIZE="1")
    with all_ranks(1, None, pytest.fail) as crew:
        assert crew.lead() is None
        assert join().world_size == 1


def test_a_rank_whose_learner_is_gone_ends_before_it_has_imported_anything(tmp_path):
    nobody = {LEADER_PID: "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "capo.launch.main", "rank"],
        env={**os.environ, **nobody, "MASTER_PORT": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 1
    assert "| transformers\n" not in told.stderr  # an import is told when it is done
