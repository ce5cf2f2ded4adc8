"""Sender and receiver must agree on every byte of a broadcast."""

import zlib

import pytest

from capo.protocol.records import TensorSpec
from capo.protocol.weight_layout import ALIGNMENT, buckets, checksum, layout


def test_every_tensor_is_aligned_and_none_overlap() -> None:
    specs = [
        TensorSpec("a", "float32", (3, 5)),
        TensorSpec("b", "bfloat16", (7,)),
        TensorSpec("scalar", "float32", ()),
        TensorSpec("none", "float16", (0, 4)),
        TensorSpec("c", "float64", (2,)),
    ]
    plan = layout(specs)
    assert plan.sizes == (60, 14, 4, 0, 16)
    assert all(offset % ALIGNMENT == 0 for offset in plan.offsets)
    ends = [offset + size for offset, size in zip(plan.offsets, plan.sizes, strict=True)]
    assert all(end <= start for end, start in zip(ends, plan.offsets[1:], strict=False))
    assert plan.total_bytes == ends[-1]
    assert layout([]).total_bytes == 0


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (TensorSpec("w", "int8", (2,)), "weight w has dtype int8"),
        (TensorSpec("w", "float32", (2, -1)), "impossible shape"),
    ],
)
def test_what_the_stream_cannot_carry_is_refused(spec: TensorSpec, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        layout([spec])


@pytest.mark.parametrize(("total", "size"), [(10, 3), (9, 3), (2, 5), (0, 4), (1, 1)])
def test_buckets_cover_the_stream_once(total: int, size: int) -> None:
    pieces = buckets(total, size)
    assert [b for start, end in pieces for b in range(start, end)] == list(range(total))
    assert all(end - start <= size for start, end in pieces)


def test_an_empty_bucket_size_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        buckets(5, 0)


def test_the_checksum_of_pieces_is_that_of_the_whole() -> None:
    data = bytes(range(256)) * 9
    whole = checksum(memoryview(data))
    parts = ""
    for start, end in buckets(len(data), 100):
        parts = checksum(memoryview(data)[start:end], parts)
    assert parts == whole == f"{zlib.crc32(data):08x}"
    assert checksum(memoryview(data[:-1] + b"x")) != whole
