"""The end of a run: every actor is sent home, and the learner waits until they are gone."""

import math
import time
from collections.abc import Callable, Mapping

from capo.protocol.errors import PeerLostError

REPEAT_DRAIN_S = 2.0
POLL_S = 0.02


def send_home(
    left: Callable[[], tuple[Mapping[str, str], bool]],
    tell: Callable[[str], None],
    timeout_s: float,
    clock: Callable[[], float],
) -> None:
    """Send every actor home; returns when all have left.

    Args:
        left: gives the names of those still connected, by id, and whether more may come.
        tell: sends one actor home; called again for those that reconnected or missed it.

    Raises:
        PeerLostError: names those that did not leave in time.
    """
    deadline = clock() + timeout_s
    told_at: dict[str, float] = {}
    while True:
        connected, more_may_come = left()
        if not connected and not more_may_come:
            return
        if connected and clock() > deadline:
            names = ", ".join(connected.values())
            raise PeerLostError(f"{names} did not leave within {timeout_s:.0f} s.")
        for actor_id in connected:
            if clock() - told_at.get(actor_id, -math.inf) > REPEAT_DRAIN_S:
                told_at[actor_id] = clock()
                tell(actor_id)
        time.sleep(POLL_S)
