"""What fails on one rank fails on all. Real ranks do it in test_ranks."""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from capo.learner.together import load_together, write_together
from capo.protocol.errors import ConfigError

FOLDER = Path("somewhere")


class Others:
    """`Ranks` whose other ones came with `number`; remembers what this one came with."""

    def __init__(self, number=0):
        self._number = number
        self.ours = []

    def largest(self, number):
        self.ours.append(number)
        return max(number, self._number)


def test_all_writes_are_made_whichever_fail(tmp_path):
    ranks, made = Others(), []
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    writes = [
        lambda: made.append("first"),
        lambda: save_file({"a": torch.zeros(1)}, occupied),
        lambda: made.append("last"),
    ]
    with pytest.raises(OSError, match="Is a directory") as caught:
        write_together(writes, tmp_path, ranks)
    assert made == ["first", "last"]
    assert caught.value.errno == errno.EISDIR == ranks.ours[0]


@pytest.mark.parametrize(
    ("said", "number"),
    [("I/O error: No space left on device (os error 28)", errno.ENOSPC), ("torn", errno.EIO)],
)
def test_what_safetensors_meets_is_an_error_of_the_system(said, number):
    def write():
        raise SafetensorError(said)

    with pytest.raises(OSError, match=said[:4]) as caught:
        write_together([write], FOLDER, Others())
    assert caught.value.errno == number


def test_a_write_of_another_rank_that_failed_fails_here_with_its_reason():
    with pytest.raises(OSError, match=os.strerror(errno.EDQUOT)) as caught:
        write_together([lambda: None], FOLDER, Others(errno.EDQUOT))
    assert caught.value.errno == errno.EDQUOT


def test_a_model_that_another_rank_could_not_load_is_loaded_nowhere():
    with pytest.raises(ConfigError, match="another rank could not load the model somewhere"):
        load_together(lambda: 1, FOLDER, Others(1))


@pytest.mark.parametrize("error", [ConfigError("a"), OSError(2, "b"), ValueError("c")])
def test_a_model_that_this_rank_could_not_load_is_told_to_all(error):
    def load():
        raise error

    ranks = Others()
    with pytest.raises(type(error)) as caught:
        load_together(load, FOLDER, ranks)
    assert caught.value is error
    assert ranks.ours == [1]
    assert load_together(lambda: 3, FOLDER, Others()) == 3
