"""Who is let in: whose an actor id is, and which version speaks with which."""

import msgspec
import pytest

from capo.protocol.handshake import KeyHolders, unreadable_refusal, version_refusal
from capo.protocol.messages import PROTOCOL_VERSION


def test_an_id_belongs_to_the_key_that_introduced_it_first() -> None:
    holders = KeyHolders()
    assert holders.refusal("actor-1", "key-1") == ""
    assert "the actor id actor-1 belongs to the key" in holders.refusal("actor-1", "key-2")
    assert holders.refusal("actor-1", "key-1") == ""
    assert holders.refusal("actor-2", "key-2") == ""


def test_an_attempt_with_another_key_does_not_count_among_its_ids() -> None:
    holders = KeyHolders(max_ids_per_key=1)
    holders.refusal("mine", "key-1")
    holders.refusal("its own", "key-2")
    assert holders.refusal("mine", "key-2") != ""
    assert holders.refusal("its own", "key-2") == ""  # which pushes out what is too many of key-2's
    assert holders.refusal("mine", "key-2") != ""


def test_of_many_ids_of_one_key_those_used_last_are_remembered() -> None:
    holders = KeyHolders(max_ids_per_key=2)
    for actor_id in ("first", "second", "first", "third"):
        assert holders.refusal(actor_id, "key-1") == ""
    assert holders.refusal("first", "key-2") != ""
    assert holders.refusal("third", "key-2") != ""
    assert holders.refusal("second", "key-2") == ""


def test_the_side_with_the_older_version_is_told_to_upgrade() -> None:
    assert version_refusal(PROTOCOL_VERSION) == ""
    assert "on the actor's machine" in version_refusal(PROTOCOL_VERSION - 1)
    assert "on the learner's machine" in version_refusal(PROTOCOL_VERSION + 1)
    assert f"version {PROTOCOL_VERSION + 1}, the learner {PROTOCOL_VERSION};" in version_refusal(
        PROTOCOL_VERSION + 1
    )


def test_a_hello_of_another_shape_is_refused_for_its_version() -> None:
    hello = {"type": "Hello", "protocol_version": PROTOCOL_VERSION + 1, "colour": "green"}
    assert unreadable_refusal(msgspec.msgpack.encode(hello)) == version_refusal(
        PROTOCOL_VERSION + 1
    )


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\x83\xa4type\xa5Hello\xa1x" + b"\x91" * 100_000,
        b"\x82\xa4type\xa5Hello\xa2\xff\xfe\x01",
        msgspec.msgpack.encode({"type": "Hello"}),
        msgspec.msgpack.encode({"type": "Hello", "protocol_version": "2"}),
        msgspec.msgpack.encode({"type": "Hello", "protocol_version": PROTOCOL_VERSION}),
        msgspec.msgpack.encode({"type": "Ready", "protocol_version": PROTOCOL_VERSION + 1}),
    ],
    ids=["empty", "no code", "deep", "no text", "no version", "a text", "our version", "no Hello"],
)
def test_what_is_no_hello_of_another_version_is_not_refused_for_it(header: bytes) -> None:
    assert unreadable_refusal(header) == ""
