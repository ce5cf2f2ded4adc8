"""What foreign code raised or returned, as text for one sentence that UTF-8 can always encode.

`str` and `repr` of a foreign object are foreign code too: they may raise anything or say megabytes.
"""

import reprlib

MAX_SENTENCE = 1000


def sentence(error: BaseException) -> str:
    """The error's text, at most MAX_SENTENCE characters; "" when it has none to give."""
    try:
        return _encodable(str(error))
    except BaseException:  # also sys.exit() in a `__str__`
        return ""


def described(error: BaseException) -> str:
    """The error's class and text."""
    text = sentence(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shown(value: object) -> str:
    """A short `repr`, or the name of its class when it has none."""
    try:
        return _encodable(reprlib.repr(value))
    except BaseException:  # also sys.exit() in a `__repr__`
        return f"a {type(value).__name__}"


def _encodable(text: str) -> str:
    """A lone surrogate cannot travel; it is written as its escape."""
    plain = str.__str__(text)[:MAX_SENTENCE]
    return plain.encode(errors="backslashreplace").decode()[:MAX_SENTENCE]
