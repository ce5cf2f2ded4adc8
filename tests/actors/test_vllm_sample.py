"""What vLLM answered, as a sample or as an error. Needs no vLLM."""

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

from capo.actors.engine import Sample
from capo.actors.guards import trainable_sample
from capo.actors.vllm_sample import Output, to_sample
from capo.protocol.errors import EngineError
from capo.protocol.records import VersionSpan
from tests.fakes import ScriptedEngine

OUTPUT = Output(
    tokens=[3, 4, 9],
    logprobs=[-0.5, 1.25, -0.25, 1.5, -2.0, 0.125],
    columns=2,
    spans=[("4", 0, 2), ("5", 2, 3)],
    finish_reason="stop",
)


def test_numbers_of_each_token_become_vectors_and_spans_become_versions() -> None:
    sample = to_sample(OUTPUT, stop_token_ids=(9,))
    assert sample.tokens.dtype == np.int32
    assert sample.tokens.tolist() == [3, 4, 9]
    assert sample.logprobs.dtype == np.float32
    assert sample.logprobs.tolist() == [-0.5, -0.25, -2.0]
    assert sample.entropies is not None
    assert sample.entropies.tolist() == [1.25, 1.5, 0.125]
    assert sample.versions == (VersionSpan(4, 2), VersionSpan(5, 1))
    assert sample.stopped


def test_without_entropies_there_is_one_number_for_each_token() -> None:
    output = replace(OUTPUT, logprobs=[-0.5, -0.25, -2.0], columns=1)
    sample = to_sample(output, stop_token_ids=(9,))
    assert sample.entropies is None
    assert sample.logprobs.tolist() == [-0.5, -0.25, -2.0]


def test_an_action_that_ends_with_no_stop_token_was_cut() -> None:
    assert not to_sample(replace(OUTPUT, finish_reason="length"), stop_token_ids=(4,)).stopped


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokens": [], "logprobs": [], "finish_reason": "abort"}, r"nothing \(.* 'abort'\)"),
        ({"logprobs": [-0.5] * 5}, "5 numbers for 3 tokens of 2 each"),
        ({"logprobs": ()}, "0 numbers for 3 tokens of 2 each"),
        ({"finish_reason": "abort"}, "ended an action with 'abort'"),
        ({"logprobs": [-0.5, 1.0, float("nan"), 1.0, -0.5, 1.0]}, "a log-prob of nan"),
        ({"logprobs": [-0.5, 1.0, float("-inf"), 1.0, -0.5, 1.0]}, "a log-prob of -inf"),
        ({"logprobs": [-0.5, 1.0, -0.5, float("inf"), -0.5, 1.0]}, "an entropy of inf"),
        ({"spans": []}, "policy versions for 0 of the 3 tokens"),
        ({"spans": [("4", 0, 2)]}, "policy versions for 2 of the 3 tokens"),
    ],
)
def test_what_cannot_be_trained_on_reaches_no_episode(changes, complaint: str) -> None:
    async def generate() -> Sample:
        return to_sample(replace(OUTPUT, **changes), stop_token_ids=(9,))

    async def scenario() -> None:
        with pytest.raises(EngineError, match=complaint):
            await trainable_sample(ScriptedEngine([]), generate(), timeout_s=5.0)

    asyncio.run(scenario())
