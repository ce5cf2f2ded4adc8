"""Bytes of the wire: stored ones, round trips of everything, and garbage."""

import typing

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capo.protocol import messages as m
from capo.protocol import records as r
from capo.protocol.errors import ProtocolError
from capo.protocol.frames import FrameDecoder, Limits, decode, encode, size_of
from tests.protocol.examples import EXAMPLES, STORED
from tests.protocol.wire import make_end, make_step

LIMITS = Limits()

TO_LEARNER = typing.get_args(m.ToLearner)
ALL_KINDS = (*TO_LEARNER, *typing.get_args(m.ToActor))


def union_of(kind: type) -> object:
    return m.ToLearner if kind in TO_LEARNER else m.ToActor


def same(left: object, right: object) -> bool:
    """Equality that looks into arrays, where NaN equals NaN and dtypes count."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(
            left, right, equal_nan=left.dtype.kind == "f"
        )
    if isinstance(left, msgspec.Struct):
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in left.__struct_fields__
        )
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.__name__)
def test_every_message_has_the_stored_bytes(kind):
    frames = [bytes(frame).hex() for frame in encode(EXAMPLES[kind])]
    assert frames == STORED[kind.__name__]


@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.__name__)
def test_every_message_is_read_from_the_stored_bytes(kind):
    frames = [bytes.fromhex(frame) for frame in STORED[kind.__name__]]
    assert same(decode(frames, union_of(kind), LIMITS), EXAMPLES[kind])


def ints(low: int = -(2**31), high: int = 2**31 - 1):
    return st.integers(low, high)


def arrays(dtype: type) -> st.SearchStrategy[np.ndarray]:
    return st.binary(max_size=64).map(
        lambda data: np.frombuffer(data[: len(data) // 4 * 4], dtype).copy()
    )


def of_type(kind: object) -> st.SearchStrategy:
    """Any value of a field's type; written for exactly the types that messages use."""
    if kind == r.IntArray:
        return arrays(np.int32)
    if kind == r.FloatArray:
        return arrays(np.float32)
    if kind is int:
        return ints(-(2**63), 2**63 - 1)
    if kind is float:
        return st.floats(allow_nan=False)
    if kind is bool:
        return st.booleans()
    if kind is str:
        return st.text(max_size=20)
    if kind is bytes:
        return st.binary(max_size=20)
    if kind is type(None):
        return st.none()
    if isinstance(kind, type) and issubclass(kind, r.StrEnum):
        return st.sampled_from(list(kind))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        fields = {name: of_type(hints[name]) for name in kind.__struct_fields__}
        return st.builds(kind, **fields)
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return st.lists(of_type(arguments[0]), max_size=3).map(tuple)
    if typing.get_origin(kind) is dict:
        return st.dictionaries(of_type(arguments[0]), of_type(arguments[1]), max_size=3)
    return st.one_of(*map(of_type, arguments))  # a union


@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_message_survives_the_wire(kind, data):
    message = data.draw(of_type(kind))
    frames = [bytes(frame) for frame in encode(message)]
    assert same(decode(frames, union_of(kind), LIMITS), message)


def test_arrays_are_not_copied_on_either_side():
    step = make_step(length=1000)
    frames = encode(m.Delivery(sequence=1, steps=(step,)))
    assert np.shares_memory(np.frombuffer(frames[2], np.int32), step.action)

    received = [bytes(frame) for frame in frames]
    action = decode(received, m.ToLearner, LIMITS).steps[0].action
    assert np.shares_memory(action, np.frombuffer(received[2], np.int32))
    assert not action.flags.writeable


def test_arrays_over_a_writable_buffer_are_read_only_too():
    frames = [bytearray(frame) for frame in encode(m.Delivery(sequence=1, steps=(make_step(),)))]
    action = decode(frames, m.ToLearner, LIMITS).steps[0].action
    with pytest.raises(ValueError, match="read-only"):
        action[0] = 5


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, np.int64),
        np.zeros(2, np.float64),
        np.zeros((2, 1), np.int32),
        np.zeros(4, np.int32)[::2],
        np.zeros(2, ">i4"),
    ],
    ids=["int64", "float64", "matrix", "strided", "big-endian"],
)
def test_an_array_that_cannot_travel_is_refused_by_the_sender(array):
    with pytest.raises(ValueError, match="contiguous int32 or float32 vector"):
        encode(m.Delivery(sequence=1, steps=(make_step(action=array),)))


def test_an_object_that_cannot_travel_is_refused_by_the_sender():
    with pytest.raises(TypeError, match="object cannot travel"):
        encode(m.Delivery(sequence=1, steps=(make_step(reward=object()),)))


def header_with(**changes) -> bytes:
    """The header of a Delivery of one step, some of whose fields are replaced."""
    header = msgspec.msgpack.decode(encode(m.Delivery(sequence=1, steps=(make_step(),)))[0])
    header["steps"][0].update(changes)
    return msgspec.msgpack.encode(header)


ARRAYS = encode(m.Delivery(sequence=1, steps=(make_step(),)))[1:]


def test_unchanged_header_is_read():
    assert decode([header_with(), *ARRAYS], m.ToLearner, LIMITS).steps[0].index == 0


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        ([], "without frames"),
        ([b""], "cannot be read"),
        ([b"\x80"], "cannot be read"),
        ([b"\xc1"], "cannot be read"),
        ([msgspec.msgpack.encode({"type": "Nonsense"})], "Nonsense"),
        ([msgspec.msgpack.encode({"type": "Ack", "sequence": 1})], "Ack"),
        ([header_with()], "array frame 0 is missing"),
        ([header_with(), *ARRAYS[:2]], "array frame 2 is missing"),
        ([header_with(), *ARRAYS, b"abcd"], "4 array frames of which its header names 3"),
        ([header_with(action=-1), *ARRAYS], "array frame 1 comes next, not -1"),
        ([header_with(action=7), *ARRAYS], "array frame 1 comes next, not 7"),
        ([header_with(action=0), *ARRAYS], "array frame 1 comes next, not 0"),
        ([header_with(action=True), *ARRAYS], "array frame 1 comes next, not True"),
        ([header_with(action=2**63), *ARRAYS], "array frame 1 comes next"),
        ([header_with(action=[1, 2]), *ARRAYS], "array frame 1 comes next"),
        ([header_with(action=None), *ARRAYS], "array frame 1 comes next"),
        ([header_with(action="x" * 10_000), *ARRAYS], "array frame 1 comes next"),
        ([header_with(), ARRAYS[0], b"abc", ARRAYS[2]], "3 bytes, no multiple of 4"),
        ([header_with(index="1"), *ARRAYS], "index"),
        ([header_with(reward="x"), *ARRAYS], "reward"),
        ([b"\x91" * 100_000 + b"\x00"], "cannot be read"),
        ([b"\x81\xa1x" + b"\x91" * 100_000], "cannot be read"),
        ([b"\xdd\xff\xff\xff\xff"], "cannot be read"),
        ([b"\xdb\xff\xff\xff\xff"], "cannot be read"),
    ],
)
def test_a_broken_message_is_refused_with_a_sentence(frames, sentence):
    with pytest.raises(ProtocolError, match=sentence) as caught:
        decode(frames, m.ToLearner, LIMITS)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (Limits(max_frames=3), "4 frames or more; at most 3"),
        (Limits(max_header_bytes=20), "at most 20 are allowed"),
        (Limits(max_message_bytes=190), "at most 190 are allowed"),
    ],
)
def test_a_message_beyond_a_limit_is_refused_before_it_is_read(limits, sentence):
    frames = [header_with(), *ARRAYS]
    assert size_of(frames) > 190
    with pytest.raises(ProtocolError, match=sentence):
        decode(frames, m.ToLearner, limits)


def test_a_decoder_goes_on_after_a_broken_message():
    decoder = FrameDecoder(m.ToLearner, LIMITS)
    with pytest.raises(ProtocolError):
        decoder.decode([header_with(), *ARRAYS[:2]])
    assert decoder.decode([header_with(), *ARRAYS]).sequence == 1


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_garbage_is_refused_and_nothing_else_escapes(frames):
    with pytest.raises(ProtocolError):
        decode(frames, m.ToLearner, LIMITS)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_damaged_messages_raise_protocol_errors_only(data):
    delivery = m.Delivery(sequence=1, steps=(make_step(),), ends=(make_end(),))
    frames = [bytearray(frame) for frame in encode(delivery)]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        where = data.draw(st.integers(0, max(0, len(frame) - 1)))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        if kind == "flip" and frame:
            frame[where] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del frame[where:]
        else:
            frame[where:where] = data.draw(st.binary(min_size=1, max_size=8))
    try:
        message = decode(frames, m.ToLearner, LIMITS)
    except ProtocolError:
        return
    assert isinstance(message, m.ToLearner)
