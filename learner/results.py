"""What one update did: the record that is logged, kept in the run file and compared by replay.

K actions of the batch, k of a minibatch. Everything but the phases' seconds comes out the same,
bit for bit, when the update is run again on the same kind of machine.
"""

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]


class ActionResults(Struct, frozen=True, kw_only=True, eq=False):
    """Per action of the batch, before the first optimizer step."""

    episode: Indices  # [K], into `UpdateResult.episode_ids`
    step: Indices  # [K], within the episode
    length: Indices  # [K], tokens
    advantage: Floats  # [K]
    weight: Floats  # [K], the behaviour weight
    kept: Flags  # [K], False = dropped by a mask or veto
    counted: Flags  # [K], False = left the batch with its group
    value: Floats | None = None  # [K], at the boundary
    returns: Floats | None = None  # [K]


class MinibatchResult(Struct, frozen=True, kw_only=True, eq=False):
    """One optimizer step. The per-action columns are in the order of `actions`."""

    epoch: int
    episodes: Indices
    actions: Indices  # [k], into the batch's actions
    mu: float
    policy_loss: float
    kl: float
    policy_grad_norm: float
    policy_lr: float
    critic_loss: float | None = None
    critic_grad_norm: float | None = None
    critic_lr: float | None = None
    log_ratio: Floats  # [k]
    units: Floats  # [k], ratio units: actions or tokens
    out_of_range: Floats  # [k], of these
    active: Floats  # [k], of these

    @property
    def ratio(self) -> Floats:
        return np.exp(self.log_ratio)


class UpdateResult(Struct, frozen=True, kw_only=True, eq=False):
    """One update, with one MinibatchResult per optimizer step."""

    version: int  # of the policy that the update started from
    episode_ids: tuple[str, ...]  # [E], in training order
    actions: ActionResults
    minibatches: tuple[MinibatchResult, ...]
    metrics: dict[str, float]
    phases: dict[str, float]  # seconds


class Difference(Struct, frozen=True):
    """Something that replay gave otherwise. `name` is its path in the record."""

    name: str
    recorded: str
    replayed: str


def encode(result: UpdateResult) -> bytes:
    """MessagePack; arrays are (dtype, shape, raw bytes)."""
    return msgspec.msgpack.encode(result, enc_hook=_pack_array)


def decode(blob: bytes) -> UpdateResult:
    """Raises ValueError if `blob` is no encoded UpdateResult."""
    return msgspec.msgpack.decode(blob, type=UpdateResult, dec_hook=_unpack_array)


def compare(recorded: UpdateResult, replayed: UpdateResult) -> list[Difference]:
    """Everything that differs in any bit, except the phases' seconds."""
    return list(_differences("", recorded, replayed))


def _differences(name: str, recorded: Any, replayed: Any) -> Iterator[Difference]:
    if isinstance(recorded, Struct) and type(recorded) is type(replayed):
        for field in recorded.__struct_fields__:
            if field != "phases":
                path = f"{name}.{field}" if name else field
                yield from _differences(path, getattr(recorded, field), getattr(replayed, field))
    elif isinstance(recorded, dict) and isinstance(replayed, dict):
        for key in sorted({*recorded, *replayed}):
            yield from _differences(f"{name}[{key}]", recorded.get(key), replayed.get(key))
    elif isinstance(recorded, tuple) and isinstance(replayed, tuple):
        if len(recorded) != len(replayed):
            yield Difference(name, f"{len(recorded)} entries", f"{len(replayed)} entries")
        for index, (one, other) in enumerate(zip(recorded, replayed, strict=False)):
            yield from _differences(f"{name}[{index}]", one, other)
    elif isinstance(recorded, np.ndarray) and isinstance(replayed, np.ndarray):
        yield from _array_difference(name, recorded, replayed)
    elif not _same_scalar(recorded, replayed):
        yield Difference(name, repr(recorded), repr(replayed))


def _array_difference(
    name: str, recorded: NDArray[Any], replayed: NDArray[Any]
) -> Iterator[Difference]:
    if recorded.shape != replayed.shape or recorded.dtype != replayed.dtype:
        yield Difference(
            name,
            f"{recorded.dtype} {recorded.shape}",
            f"{replayed.dtype} {replayed.shape}",
        )
        return
    width = recorded.dtype.itemsize
    bits = [
        np.frombuffer(array.tobytes(), np.uint8).reshape(-1, width)
        for array in (recorded, replayed)
    ]
    changed = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
    if len(changed):
        first = int(changed[0])
        yield Difference(
            f"{name}[{first}]",
            f"{recorded.flat[first]!r} ({len(changed)} of {recorded.size} differ)",
            repr(replayed.flat[first]),
        )


def _same_scalar(recorded: Any, replayed: Any) -> bool:
    if isinstance(recorded, float) and isinstance(replayed, float):
        if math.isnan(recorded) or math.isnan(replayed):
            return math.isnan(recorded) and math.isnan(replayed)
        return recorded == replayed and math.copysign(1, recorded) == math.copysign(1, replayed)
    return type(recorded) is type(replayed) and bool(recorded == replayed)


def _pack_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    raise NotImplementedError(f"cannot encode {type(value)}")


def _unpack_array(type_: Any, value: Any) -> Any:
    dtype, shape, data = value
    if dtype not in ("<f8", "<i8", "|b1"):
        raise ValueError(f"array of unexpected dtype {dtype!r}")
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
