"""What others say, for people to read: on one line, steering no terminal, and not too often."""

import re
import time
from collections.abc import Callable

_STEERING = re.compile(
    r"[\x00-\x1f\x7f-\x9f"  # control characters
    r"\u2028\u2029"  # line and paragraph separators
    r"\u200e\u200f\u202a-\u202e\u2066-\u2069"  # the direction in which text runs
    r"\ud800-\udfff]"  # lone surrogates, which cannot be printed
)


def plain(text: str) -> str:
    """`text` with every such character as its escape, as in \\x1b."""
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def first_line(error: Exception) -> str:
    """Of the text of an error that libraries make long; its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


class Seldom:
    """Passes one sentence in `every_s` seconds on to `say`, with the number of those left out."""

    def __init__(
        self,
        say: Callable[[str], None],
        every_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._every_s = every_s
        self._clock = clock
        self._next_at = 0.0
        self._left_out = 0

    def __call__(self, sentence: str) -> None:
        now = self._clock()
        if now < self._next_at:
            self._left_out += 1
            return
        self._next_at = now + self._every_s
        more = f" (and {self._left_out} more before it)" if self._left_out else ""
        self._left_out = 0
        self._say(sentence + more)
