"""The nearest right word for a wrong one, as the end of a sentence."""

import difflib
from collections.abc import Iterable


def nearest(wrong: str, right: Iterable[str]) -> str:
    """ "did you mean 'X'?" where something is close, else "known are: ..."."""
    known = sorted(right)
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(known)}."
