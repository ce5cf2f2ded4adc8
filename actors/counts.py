"""What an actor counts since it started, for its heartbeats."""

from capo.protocol.records import EpisodeEnd, EpisodeStatus

MIN_RATE_S = 0.5  # over less, rates say little; those of the previous heartbeat are repeated


class Counts:
    """Sums since the start; rates are since the last heartbeat. Times are time.monotonic()."""

    def __init__(self, now: float) -> None:
        self.tokens = 0
        self.broadcasts = 0
        self.pause_s = 0.0
        self.ended = dict.fromkeys(EpisodeStatus, 0)
        self._last = (now, 0)  # the previous heartbeat: its time, and the tokens until then
        self._rate = 0.0
        self._busy_s = 0.0
        self._playing = False
        self._since = now
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
        """For a heartbeat at `now`; the next rates are over the time from then on."""
        then, tokens = self._last
        if now - then >= MIN_RATE_S:
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
