"""What a replay found. Needs no torch, so that it can be shown without."""

from msgspec import Struct

from capo.learner.results import Difference, UpdateResult


class Replayed(Struct, frozen=True, kw_only=True):
    """An update as it was and as it came out now. `differences` is empty if every bit is equal.

    `diverged_at`: the first repeated update before it that came out otherwise, if one did.
    """

    version: int
    started_from: int
    overrides: tuple[str, ...]
    recorded: UpdateResult
    replayed: UpdateResult
    differences: tuple[Difference, ...]
    diverged_at: int | None
