"""How the tensors of a broadcast lie in one flat stream of bytes. Sender and receiver agree by it.

Every tensor starts at a multiple of `ALIGNMENT`, so that it can be viewed in place in any dtype;
gaps are zero. The checksum is a CRC-32 of the whole: it guards against faults, not against people,
and costs a quarter of the time of a cryptographic digest. Knows no torch: dtypes are names.
"""

import math
import zlib
from collections.abc import Sequence

from msgspec import Struct

from capo.protocol.records import TensorSpec

ALIGNMENT = 64
BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


class Layout(Struct, frozen=True):
    """`offsets[i]` is where tensor i starts and `sizes[i]` its length, both in bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    total_bytes: int


def layout(tensors: Sequence[TensorSpec]) -> Layout:
    """Raises ValueError for a dtype the stream does not carry or a negative dimension."""
    offsets: list[int] = []
    sizes: list[int] = []
    end = 0
    for tensor in tensors:
        if tensor.dtype not in BYTES_OF_DTYPE:
            raise ValueError(
                f"weight {tensor.name} has dtype {tensor.dtype}; "
                f"a broadcast carries {', '.join(sorted(BYTES_OF_DTYPE))}"
            )
        if any(dimension < 0 for dimension in tensor.shape):
            raise ValueError(f"weight {tensor.name} has the impossible shape {tensor.shape}")
        start = -(-end // ALIGNMENT) * ALIGNMENT
        size = math.prod(tensor.shape) * BYTES_OF_DTYPE[tensor.dtype]
        offsets.append(start)
        sizes.append(size)
        end = start + size
    return Layout(tuple(offsets), tuple(sizes), end)


def buckets(total_bytes: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """(start, end) of the pieces in which the stream is sent, in order."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, not {bucket_bytes}")
    return [
        (start, min(start + bucket_bytes, total_bytes))
        for start in range(0, total_bytes, bucket_bytes)
    ]


def checksum(piece: memoryview, before: str = "") -> str:
    """Of a stream's next piece, given that of the pieces before it."""
    return f"{zlib.crc32(piece, int(before, 16) if before else 0):08x}"
