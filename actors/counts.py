"""What an actor counts since it started, for its heartbeats."""

import time

from capo.protocol.records import EpisodeEnd, EpisodeStatus


class Counts:
    """Sums since the start; rates are since the last heartbeat."""

    def __init__(self) -> None:
        self.tokens = 0
        self.broadcasts = 0
        self.pause_s = 0.0
        self.ended = dict.fromkeys(EpisodeStatus, 0)
        self._last = (time.monotonic(), 0)
        self._rate = 0.0
        self._busy_s = 0.0
        self._playing = False
        self._since = time.monotonic()
        self._busy_fraction = 0.0

    def count(self, end: EpisodeEnd) -> None:
        self.ended[end.status] += 1

    def busy(self, now: float, playing: bool) -> None:
        """Whether anything is played from `now` on."""
        if self._playing:
            self._busy_s += now - self._since
        self._playing = playing
        self._since = now

    def metrics(self, now: float) -> dict[str, float]:
        then, tokens = self._last
        if now - then >= 0.5:
            self.busy(now, self._playing)
            self._busy_fraction = self._busy_s / (now - then)
            self._busy_s = 0.0
            self._rate = (self.tokens - tokens) / (now - then)
            self._last = (now, self.tokens)
        return {
            "tokens_per_s": self._rate,
            "busy_fraction": self._busy_fraction,
            "tokens": float(self.tokens),
            "broadcasts": float(self.broadcasts),
            "pause_s": self.pause_s,
        } | {f"episodes_{status.value}": float(count) for status, count in self.ended.items()}
