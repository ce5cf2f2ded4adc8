"""What another rank does with orders that rank 0 has to decide about."""

from pathlib import Path

import pytest

from capo.learner.lead import follow
from capo.learner.orders import End, Load, Open, Save, Score, Update
from tests.factories import batch_of_episodes, run_config, tiny_policy
from tests.factories import tokens as some_tokens

CONFIG = run_config()


class Given:
    """Orders from a list."""

    def __init__(self, *orders):
        self._orders = list(orders)

    def take(self):
        return self._orders.pop(0)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
    return str(tiny_policy(tmp_path_factory.mktemp("policy")))


def blocked(folder: Path) -> str:
    """Where this rank cannot write its part of the optimizer, which only safetensors notices."""
    (folder / "optimizer" / "policy-rank-0-of-1.safetensors").mkdir(parents=True)
    return str(folder)


def test_a_rank_goes_on_after_what_rank_0_has_to_decide_about(policy, tmp_path):
    saved = tmp_path / "saved"
    follow(
        Given(
            Open(CONFIG, str(tmp_path / "no-such-model")),
            Open(CONFIG, policy),
            Load(str(tmp_path / "no-such-checkpoint")),
            Score(some_tokens(1)),
            Update(7, tuple(batch_of_episodes(6))),
            Save(blocked(tmp_path / "blocked")),
            Save(str(saved)),
            End(),
        )
    )
    assert (saved / "trainer.json").is_file()


def test_an_order_without_a_trainer_is_a_fault_of_rank_0(tmp_path):
    with pytest.raises(AssertionError, match="Save was ordered before Open"):
        follow(Given(Save(str(tmp_path)), End()))
