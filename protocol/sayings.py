"""What others say, for people to read: on one line, steering no terminal, and not too often."""

import re
import time
from collections.abc import Callable

_STEERING = re.compile(
    r"[\x00-\x1f\x7f-\x9f"  # control characters
    r"\u2028\u2029"  # line and paragraph separators
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # the direction in which text runs
    r"\ud800-\udfff]"  # lone surrogates, which cannot be printed
)


def plain(text: str) -> str:
    """`text` with every character that steers a terminal as its escape, as in \\x1b."""
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def first_line(error: Exception) -> str:
    """Of the text of an error that libraries make long; its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


class Seldom:
    """Passes sentences on to `say`: `burst` at once, and one in `every_s` seconds after that.

    What was left out is counted, and told with the last of it when `due` finds that there is time.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        burst: int = 8,
        every_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._burst = burst
        self._every_s = every_s
        self._clock = clock
        self._free = float(burst)
        self._counted_at = clock()
        self._left_out = 0
        self._last = ""

    def __call__(self, sentence: str) -> None:
        if self._take():
            self._say(sentence)
        else:
            self._left_out += 1
            self._last = sentence

    def due(self) -> None:
        """To be called now and then."""
        if self._left_out and self._take():
            others = f" (and {self._left_out - 1} more like it)" if self._left_out > 1 else ""
            self._left_out = 0
            self._say(self._last + others)

    def _take(self) -> bool:
        now = self._clock()
        self._free = min(self._burst, self._free + (now - self._counted_at) / self._every_s)
        self._counted_at = now
        if self._free < 1:
            return False
        self._free -= 1
        return True
