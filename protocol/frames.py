"""Messages as frames: one MessagePack header, then one raw little-endian frame for each array.

In the header an array is the number of its frame; frames are numbered from 0 in the order in which
the header names them, each named once. The dtype is that of the field's annotation; the shape is
always [n]. Nothing is copied in either direction, and what comes in is read-only. This module does
not know what a message means (`validate` does).
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Struct

from capo.protocol.errors import ProtocolError

M = TypeVar("M")
Frame = bytes | memoryview

MIB = 1 << 20


class Limits(Struct, frozen=True, kw_only=True):
    """What one message may be at most. Checked before anything is decoded or allocated."""

    max_frames: int = 4096  # the header included
    max_header_bytes: int = 4 * MIB
    max_message_bytes: int = 64 * MIB  # all frames together


def encode(message: Struct) -> list[Frame]:
    """The frames of `message`; the array frames are views of its arrays.

    Raises ValueError for an array that is not a contiguous [n] of a 4-byte little-endian dtype.
    """
    frames: list[Frame] = [b""]

    def reference(value: object) -> int:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} cannot travel in a message")
        if value.ndim != 1 or value.dtype.str not in ("<i4", "<f4") or not value.flags.c_contiguous:
            raise ValueError(
                f"an array of {value.dtype} {list(value.shape)} cannot travel in a message; "
                "make it a contiguous int32 or float32 vector"
            )
        frames.append(value.data.cast("B") if value.size else b"")
        return len(frames) - 2

    frames[0] = msgspec.msgpack.Encoder(enc_hook=reference).encode(message)
    return frames


def size_of(frames: Sequence[Frame]) -> int:
    """Bytes of all frames together."""
    return sum(map(len, frames))


def check_size(frames: Sequence[Frame], limits: Limits) -> None:
    """Raise ProtocolError if the message is larger than `limits`."""
    if not frames:
        raise ProtocolError("a message without frames")
    if len(frames) > limits.max_frames:
        raise ProtocolError(
            f"a message of {len(frames)} frames or more; at most {limits.max_frames} are allowed"
        )
    if len(frames[0]) > limits.max_header_bytes:
        raise ProtocolError(
            f"a message header of {len(frames[0])} bytes; at most {limits.max_header_bytes} "
            "are allowed"
        )
    size = size_of(frames)
    if size > limits.max_message_bytes:
        raise ProtocolError(
            f"a message of {size} bytes or more; at most {limits.max_message_bytes} are allowed"
        )


class FrameDecoder(Generic[M]):
    """Reads messages of one union type. For one thread: it keeps what it reads from."""

    def __init__(self, kind: Any, limits: Limits) -> None:
        self._limits = limits
        self._frames: Sequence[Frame] = ()
        self._next = 0
        self._dtypes: dict[Any, np.dtype[Any]] = {}
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            kind, dec_hook=self._array
        )

    def decode(self, frames: Sequence[Frame]) -> M:
        """The message in `frames`; raises ProtocolError if there is none."""
        check_size(frames, self._limits)
        self._frames = frames
        self._next = 1
        try:
            message: M = self._decoder.decode(frames[0])
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise ProtocolError(f"a message that cannot be read: {error}") from None
        finally:
            self._frames = ()
        if self._next != len(frames):
            raise ProtocolError(
                f"a message with {len(frames) - 1} array frames of which its header names "
                f"{self._next - 1}"
            )
        return message

    def _array(self, kind: Any, number: Any) -> Any:
        position = self._next
        if type(number) is not int or number != position - 1:
            raise ValueError(f"array frame {position - 1} comes next, not {number!r:.40}")
        if position >= len(self._frames):
            raise ValueError(f"array frame {number} is missing")
        dtype = self._dtypes.get(kind)
        if dtype is None:
            dtype = self._dtypes[kind] = np.dtype(get_args(get_args(kind)[1])[0]).newbyteorder("<")
        frame = self._frames[position]
        if len(frame) % dtype.itemsize:
            raise ValueError(f"array frame {number} has {len(frame)} bytes, no multiple of 4")
        array = np.frombuffer(frame, dtype)
        array.setflags(write=False)
        self._next = position + 1
        return array


def decode(frames: Sequence[Frame], kind: Any, limits: Limits) -> Any:
    """One message of the union `kind`, for callers that read few; others keep a FrameDecoder."""
    decoder: FrameDecoder[Any] = FrameDecoder(kind, limits)
    return decoder.decode(frames)
