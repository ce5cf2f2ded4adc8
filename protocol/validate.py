"""What the values of a message must satisfy beyond their types. L action tokens.

Decoding guarantees types, dtypes and sizes; this module refuses what would later poison a batch or
a run file: NaN rewards, spans that do not cover the action, numbers no database column holds.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capo.protocol.errors import ProtocolError
from capo.protocol.messages import (
    ActorHeartbeat,
    Delivery,
    Goodbye,
    GroupAccept,
    GroupFormed,
    Hello,
    Ready,
    ToLearner,
    WeightsReport,
)
from capo.protocol.records import EpisodeEnd, EpisodeStatus, FloatArray, IntArray, Step

MAX_ID_LENGTH = 256
MAX_NUMBER = 2**31 - 1  # indices, lengths and versions
MAX_SEQUENCE = 2**53  # of deliveries, and epochs of weight groups
MAX_WORKERS = 4096  # ranks of one actor
MAX_NAMED_VALUES = 256  # entries of `info` or `metrics`
MAX_TEXT_LENGTH = 1 << 16

INT32 = np.dtype(np.int32)
FLOAT32 = np.dtype(np.float32)


class _Fault(Exception):
    """What is wrong, said without where: that costs time and is rarely needed."""


def check_hello(hello: Hello) -> None:
    """Raise ProtocolError unless `hello` introduces an actor."""
    try:
        _check_id("actor_id", hello.actor_id)
        _check_text("actor_name", hello.actor_name, MAX_ID_LENGTH)
        _check_text("run_id", hello.run_id, MAX_ID_LENGTH)
        _check_text("tokenizer_digest", hello.tokenizer_digest, MAX_ID_LENGTH)
        _check_number("capacity", hello.capacity, 1)
        _check_number("weights_version", hello.weights_version, -1)
        if len(hello.transports) > 16:
            raise _Fault(f"{len(hello.transports)} transports; at most 16 are allowed")
        for transport in hello.transports:
            _check_id("transport", transport)
        for lease in hello.held_leases:
            _check_id("held lease", lease)
    except _Fault as fault:
        raise ProtocolError(f"Hello: {fault}") from None


def check_delivery(delivery: Delivery) -> None:
    """Raise ProtocolError unless every record of `delivery` can be stored and trained on."""
    if not 1 <= delivery.sequence <= MAX_SEQUENCE:
        raise ProtocolError(f"Delivery: sequence {delivery.sequence}; they count from 1")
    if not delivery.steps and not delivery.ends:
        raise ProtocolError(f"Delivery {delivery.sequence}: it carries no records")
    for step in delivery.steps:
        check_step(step)
    for end in delivery.ends:
        check_end(end)


def check_control(message: ToLearner) -> None:
    """Raise ProtocolError unless the numbers and texts of any other message are possible ones."""
    try:
        _check_control(message)
    except _Fault as fault:
        raise ProtocolError(f"{type(message).__name__}: {fault}") from None


def check_step(step: Step) -> None:
    """Raise ProtocolError unless `step` is a transition that can be trained on."""
    try:
        _check_step(step)
    except _Fault as fault:
        raise ProtocolError(
            f"step {step.index} of episode {step.episode_id:.99}: {fault}"
        ) from None


def check_end(end: EpisodeEnd) -> None:
    """Raise ProtocolError unless `end` says how its episode ended and how to bootstrap it."""
    try:
        _check_end(end)
    except _Fault as fault:
        raise ProtocolError(f"end of episode {end.episode_id:.99}: {fault}") from None


def _check_control(message: ToLearner) -> None:
    if isinstance(message, GroupAccept | GroupFormed | WeightsReport) and not (
        0 <= message.epoch <= MAX_SEQUENCE
    ):
        raise _Fault(f"epoch is {message.epoch}; it must be between 0 and {MAX_SEQUENCE}")
    match message:
        case Ready():
            _check_number("weights_version", message.weights_version, -1)
        case ActorHeartbeat():
            _check_number("running", message.running, 0)
            _check_text("waiting_for", message.waiting_for, MAX_TEXT_LENGTH)
            _check_named_values("metrics", message.metrics)
            for lease in message.held_leases or ():
                _check_id("held lease", lease)
        case GroupAccept():
            _check_number("workers", message.workers, 1)
            if message.workers > MAX_WORKERS:
                raise _Fault(f"{message.workers} workers; at most {MAX_WORKERS} are allowed")
        case GroupFormed():
            _check_text("error", message.error, MAX_TEXT_LENGTH)
        case WeightsReport():
            _check_number("version", message.version, 0)
            _check_text("error", message.error, MAX_TEXT_LENGTH)
            _check_text("checksum", message.checksum, MAX_ID_LENGTH)
            _check_finite("pause_s", message.pause_s)
        case Goodbye():
            _check_text("reason", message.reason, MAX_TEXT_LENGTH)


def _check_step(step: Step) -> None:
    _check_id("episode_id", step.episode_id)
    _check_number("index", step.index, 0)
    _check_number("keep", step.keep, 0)
    if step.index == 0 and step.keep != 0:
        raise _Fault(f"keep is {step.keep}, but nothing comes before the first step")
    if step.keep + step.observation.size == 0:
        raise _Fault("its prompt is empty")
    length = step.action.size  # L
    if length == 0:
        raise _Fault("its action is empty")
    _check_tokens("observation", step.observation)
    _check_tokens("action", step.action)
    _check_per_token("behaviour_logprobs", step.behaviour_logprobs, length)
    if step.entropies is not None:
        _check_per_token("entropies", step.entropies, length)
    covered = 0
    for span in step.versions:
        _check_number("policy version", span.version, 0)
        _check_number("length of a version span", span.num_tokens, 1)
        covered += span.num_tokens
    if covered != length:
        raise _Fault(f"its version spans cover {covered} tokens, but its action has {length}")
    _check_finite("reward", step.reward)
    _check_text("state_key", step.state_key, MAX_TEXT_LENGTH)
    _check_named_values("info", step.info)


def _check_end(end: EpisodeEnd) -> None:
    _check_id("episode_id", end.episode_id)
    _check_number("num_steps", end.num_steps, 0)
    _check_number("final_keep", end.final_keep, 0)
    _check_finite("outcome", end.outcome)
    _check_text("error", end.error, MAX_TEXT_LENGTH)
    _check_named_values("metrics", end.metrics)
    if end.final_observation is not None:
        if end.status is not EpisodeStatus.TRUNCATED:
            raise _Fault(
                "a final observation belongs to a truncated episode, not to one that is "
                f"{end.status.value}"
            )
        _check_tokens("final_observation", end.final_observation)
        if end.final_keep + end.final_observation.size == 0:
            raise _Fault("its final prompt is empty")
    elif end.status is EpisodeStatus.TRUNCATED and end.num_steps > 0:
        raise _Fault("it is truncated but has no final observation to bootstrap")


def _check_id(name: str, value: str) -> None:
    if not value:
        raise _Fault(f"{name} is empty")
    _check_text(name, value, MAX_ID_LENGTH)


def _check_text(name: str, value: str, max_length: int) -> None:
    if len(value) > max_length:
        raise _Fault(f"{name} has {len(value)} characters; at most {max_length} are allowed")


def _check_number(name: str, value: int, least: int) -> None:
    if not least <= value <= MAX_NUMBER:
        raise _Fault(f"{name} is {value}; it must be between {least} and {MAX_NUMBER}")


def _check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise _Fault(f"{name} is {value}; it must be a finite number")


def _check_tokens(name: str, tokens: IntArray) -> None:
    _check_vector(name, tokens, INT32)
    if tokens.size and np.minimum.reduce(tokens) < 0:
        raise _Fault(f"{name} has the negative token id {tokens.min()}")


def _check_per_token(name: str, values: FloatArray, length: int) -> None:
    _check_vector(name, values, FLOAT32)
    if values.size != length:
        raise _Fault(f"{values.size} {name} for an action of {length} tokens")
    if not np.isfinite(values).all():
        raise _Fault(f"{name} are not all finite numbers")


def _check_vector(name: str, array: NDArray[np.generic], dtype: np.dtype[Any]) -> None:
    if array.dtype != dtype or array.ndim != 1:
        raise _Fault(f"{name} is {array.dtype} {list(array.shape)}; it must be a {dtype} vector")


def _check_named_values(name: str, values: dict[str, float]) -> None:
    if len(values) > MAX_NAMED_VALUES:
        raise _Fault(f"{name} has {len(values)} entries; at most {MAX_NAMED_VALUES} are allowed")
    for key in values:
        _check_text(f"a key of {name}", key, MAX_ID_LENGTH)
