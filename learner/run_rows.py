"""From records of the wire to rows of the run file and back. Pure functions, no SQL.

Arrays become little-endian blobs; spans and dictionaries become JSON.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from capo.protocol.records import EpisodeEnd, EpisodeStatus, IntArray, Step, VersionSpan

StepRow = tuple[
    str, int, int, int, int, int, float, str, str, str, bytes, bytes, bytes, bytes | None
]
EndColumns = tuple[EpisodeStatus, int, float, int, bytes | None, str, str]
LIMIT = 2**31  # of counts and versions; far from what SQLite can hold


def step_fault(step: Step, vocabulary_size: int) -> str:
    """Why a step cannot be training data, "" if it can."""
    length = len(step.action)
    if not length:
        return "its action has no token"
    if unknown := _unknown_token(vocabulary_size, step.observation, step.action):
        return unknown
    if len(step.behaviour_logprobs) != length:
        return f"{len(step.behaviour_logprobs)} log-probs for {length} action tokens"
    if sum(span.num_tokens for span in step.versions) != length:
        return f"version spans do not cover its {length} action tokens"
    if not math.isfinite(step.reward):
        return f"its reward is {step.reward}"
    if not np.isfinite(step.behaviour_logprobs).all():
        return "a log-prob is not a number"
    if step.entropies is not None and len(step.entropies) != length:
        return f"{len(step.entropies)} entropies for {length} action tokens"
    if not (0 <= step.keep < LIMIT and 0 <= step.index < LIMIT):
        return f"its index is {step.index}, its keep {step.keep}"
    if any(not (0 <= span.version < LIMIT and span.num_tokens > 0) for span in step.versions):
        return "a version span is impossible"
    return ""


def _unknown_token(vocabulary_size: int, *tokens: IntArray) -> str:
    for part in tokens:
        # As unsigned numbers negative ones are large: one pass finds both kinds.
        if len(part) and np.maximum.reduce(part.view(np.uint32)) >= vocabulary_size:
            return f"a token id is not in the vocabulary of {vocabulary_size}"
    return ""


def step_row(step: Step) -> StepRow:
    """The columns of table `steps`, in order, of a step without fault."""
    versions = [span.version for span in step.versions]
    return (
        step.episode_id,
        step.index,
        step.keep,
        len(step.action),
        min(versions),
        max(versions),
        step.reward,
        step.state_key,
        encode_spans(step.versions),
        encode_numbers(step.info),
        blob(step.observation, "<i4"),
        blob(step.action, "<i4"),
        blob(step.behaviour_logprobs, "<f4"),
        None if step.entropies is None else blob(step.entropies, "<f4"),
    )


def step_record(row: StepRow) -> Step:
    """The inverse of `step_row`."""
    return Step(
        episode_id=row[0],
        index=row[1],
        keep=row[2],
        reward=row[6],
        state_key=row[7],
        versions=msgspec.json.decode(row[8], type=tuple[VersionSpan, ...]),
        info=decode_numbers(row[9]),
        observation=np.frombuffer(row[10], dtype="<i4"),
        action=np.frombuffer(row[11], dtype="<i4"),
        behaviour_logprobs=np.frombuffer(row[12], dtype="<f4"),
        entropies=None if row[13] is None else np.frombuffer(row[13], dtype="<f4"),
    )


def end_fault(end: EpisodeEnd, vocabulary_size: int) -> str:
    """Why the end of an episode cannot be believed, "" if it can."""
    if end.final_observation is not None and (
        unknown := _unknown_token(vocabulary_size, end.final_observation)
    ):
        return unknown
    if not math.isfinite(end.outcome):
        return f"its outcome is {end.outcome}"
    if not (0 <= end.num_steps < LIMIT and 0 <= end.final_keep < LIMIT):
        return f"its end claims {end.num_steps} steps and keeps {end.final_keep} tokens"
    return ""


def end_record(
    episode_id: str,
    status: EpisodeStatus,
    num_steps: int,
    outcome: float,
    final_keep: int,
    final_observation: bytes | None,
    metrics: str,
    error: str,
) -> EpisodeEnd:
    return EpisodeEnd(
        episode_id=episode_id,
        status=status,
        num_steps=num_steps,
        outcome=outcome,
        final_keep=final_keep,
        final_observation=(
            None if final_observation is None else np.frombuffer(final_observation, dtype="<i4")
        ),
        metrics=decode_numbers(metrics),
        error=error,
    )


def blob(array: NDArray[np.generic], dtype: str) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def encode_spans(spans: Sequence[VersionSpan]) -> str:
    return f"[{','.join([f'[{span.version},{span.num_tokens}]' for span in spans])}]"


def encode_numbers(numbers: dict[str, float]) -> str:
    """JSON; what is not finite becomes null."""
    return msgspec.json.encode(numbers).decode() if numbers else "{}"


def decode_numbers(text: str) -> dict[str, float]:
    if text == "{}":
        return {}
    decoded = msgspec.json.decode(text, type=dict[str, float | None])
    return {key: math.nan if value is None else value for key, value in decoded.items()}
