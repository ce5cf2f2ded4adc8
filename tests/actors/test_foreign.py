"""Text of foreign objects: always a short sentence that UTF-8 can encode, whatever they do."""

import sys

import pytest

from capo.actors.foreign import MAX_SENTENCE, described, sentence, shown


class Saying(Exception):
    """Its `str` and `repr` are what `say` returns or raises."""

    def __init__(self, say) -> None:
        super().__init__()
        self.say = say

    def __str__(self) -> str:
        return self.say()

    __repr__ = __str__


class Trap(str):
    """A string that the library must not use as one."""

    def encode(self, *_, **__) -> bytes:
        raise RuntimeError("caught")

    def __getitem__(self, _) -> str:
        raise RuntimeError("caught")

    def __str__(self) -> str:
        raise RuntimeError("caught")


def test_an_error_is_described_by_its_class_and_its_text() -> None:
    assert described(ValueError("broken door")) == "ValueError: broken door"
    assert described(ValueError()) == "ValueError"


@pytest.mark.parametrize("last_words", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_a_text_that_raises_is_none(last_words) -> None:
    def say() -> str:
        raise last_words

    assert sentence(Saying(say)) == ""
    assert described(Saying(say)) == "Saying"
    assert "Saying" in shown(Saying(say))


def test_a_repr_that_ends_the_process_leaves_the_name_of_the_class() -> None:
    assert shown(Saying(sys.exit)) == "a Saying"


@pytest.mark.parametrize("text", ["a" * 10**6, "\ud800" * 10**6, "ü" * MAX_SENTENCE])
def test_no_text_is_longer_than_a_sentence_may_be(text: str) -> None:
    assert 0 < len(sentence(ValueError(text))) <= MAX_SENTENCE
    assert 0 < len(shown(Saying(lambda: text))) <= MAX_SENTENCE


def test_what_utf_8_cannot_encode_is_written_as_its_escape() -> None:
    assert sentence(ValueError("door \ud800")) == r"door \ud800"
    assert r"\ud800" in shown("\ud800")


def test_a_string_with_methods_of_its_own_is_only_read() -> None:
    text = sentence(Saying(lambda: Trap("door")))
    assert type(text) is str
    assert text == "door"


def test_a_large_value_is_shown_short() -> None:
    assert shown([1, 2]) == "[1, 2]"
    assert len(shown(list(range(10**6)))) < 100
