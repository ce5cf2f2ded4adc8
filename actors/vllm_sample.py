"""What is asked of vLLM for one action, and what of its answer becomes a `Sample`.

vLLM is imported when the first action is sampled, not with this module.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from capo.actors.engine import Sample
from capo.protocol.errors import EngineError
from capo.protocol.records import VersionSpan

ENTROPY_COLUMNS = 2  # log-prob of the sampled token, entropy of its distribution


class Output(Struct, frozen=True):
    """The parts of vLLM's final output that are read here.

    `logprobs` holds `columns` numbers per token: log-prob and, if recorded, entropy.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    columns: int
    spans: Sequence[tuple[str, int, int]]
    finish_reason: str


def sampling_parameters(
    max_tokens: int,
    temperature: float,
    seed: int,
    stop_token_ids: Sequence[int],
    columns: int,
) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        stop_token_ids=list(stop_token_ids),
        logprobs=columns - 1,
        flat_logprobs=True,
        detokenize=False,
        skip_clone=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def read_output(completion: Any, columns: int) -> Output:
    spans = completion.weight_versions or ()
    return Output(
        tokens=completion.token_ids,
        logprobs=completion.logprobs.logprobs if completion.logprobs is not None else (),
        columns=columns,
        spans=[(span.version, span.start, span.end) for span in spans],
        finish_reason=completion.finish_reason or "",
    )


def to_sample(output: Output, stop_token_ids: Sequence[int]) -> Sample:
    """Raises EngineError for what is no answer; whether it can be trained on is for `guards`."""
    columns = output.columns
    tokens = np.asarray(output.tokens, dtype=np.int32)
    numbers = np.asarray(output.logprobs, dtype=np.float32)
    if len(tokens) == 0:
        raise EngineError(f"the engine sampled nothing (finish reason {output.finish_reason!r})")
    if len(tokens) * columns != len(numbers):
        raise EngineError(
            f"the engine gave {len(numbers)} numbers for {len(tokens)} tokens of {columns} each"
        )
    logprobs, *rest = np.ascontiguousarray(numbers.reshape(-1, columns).T)
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(f"the engine ended an action with {output.finish_reason!r}")
    versions = tuple(VersionSpan(int(version), end - start) for version, start, end in output.spans)
    return Sample(
        tokens=tokens,
        logprobs=logprobs,
        versions=versions,
        stopped=int(tokens[-1]) in stop_token_ids,
        entropies=rest[0] if rest else None,
    )
