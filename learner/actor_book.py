"""The book of actors: who is connected with what weights, what each plays, and who is awaited.

Knows no lock, no clock and no sockets: the service, which shares it between threads, guards it.
"""

from collections.abc import Iterable

from msgspec import Struct

from capo.learner.status_file import ActorStatus
from capo.learner.weights import BroadcastReport
from capo.protocol.link import LAST_RETRY_S
from capo.protocol.messages import ActorHeartbeat, Hello

RETURN_GRACE = 4.0  # an actor from before a restart has so many `dead_after_s` to come back
RECONNECTED = "it reconnected"
RETRY_WEIGHTS_S = 30.0  # before an actor that missed a broadcast is invited again


class Actor(Struct):
    """What the learner knows of one connected actor."""

    name: str
    capacity: int
    weights_version: int
    ready: bool
    playing: set[str]
    connected_at: float
    invite_after: float = 0.0
    missing: dict[str, float] = {}  # what it plays by our book but not by its own, since when
    heard_at: float = 0.0
    heartbeat: ActorHeartbeat = ActorHeartbeat()


def refusal(hello: Hello, run_id: str, tokenizer_digest: str) -> str:
    """Why an actor cannot take part in this run, "" if it can."""
    if hello.run_id not in ("", run_id):
        return f"this learner serves run {run_id}, not {hello.run_id}; start a new actor."
    if hello.tokenizer_digest not in ("", tokenizer_digest):
        return (
            f"tokenizer {hello.tokenizer_digest[:12]} is not the run's {tokenizer_digest[:12]}; "
            "start the actor without a tokenizer of its own."
        )
    return ""


class ActorBook:
    """`connected` are the actors by id; times are of one monotonic clock, in seconds.

    Awaited after a restart are `holders`, which have leases in play, and `before`, which the run
    knew: what the former hold is given to others after a while, the latter may only be sent home.
    """

    def __init__(
        self,
        *,
        max_capacity: int,
        dead_after_s: float,
        holders: Iterable[str],
        before: Iterable[str],
        now: float,
    ) -> None:
        self.connected: dict[str, Actor] = {}
        self._max_capacity = max_capacity
        self._dead_after_s = dead_after_s
        self._expected = dict.fromkeys(holders, now + RETURN_GRACE * dead_after_s)
        self._returning = set(before)  # not seen since this learner began
        # Long enough for an actor that waits for its next attempt to connect.
        self._return_until = now + dead_after_s + 2 * LAST_RETRY_S

    def join(self, hello: Hello, playing: set[str], now: float) -> bool:
        """An actor is connected, and plays these episodes. Returns whether it was already."""
        was_connected = hello.actor_id in self.connected
        self._expected.pop(hello.actor_id, None)
        self._returning.discard(hello.actor_id)
        self.connected[hello.actor_id] = Actor(
            name=hello.actor_name,
            capacity=min(hello.capacity, self._max_capacity),
            weights_version=hello.weights_version,
            ready=hello.weights_version >= 0,
            playing=playing,
            connected_at=now,
            heard_at=now,
        )
        return was_connected

    def leave(self, actor_id: str) -> Actor | None:
        """An actor is gone; what was known of it, if anything."""
        return self.connected.pop(actor_id, None)

    def engine_up(self, actor_id: str, weights_version: int) -> None:
        """An actor's engine runs, with weights of this version."""
        actor = self.connected.get(actor_id)
        if actor is not None:
            actor.weights_version = weights_version
            actor.ready = True

    def heard(self, actor_id: str, heartbeat: ActorHeartbeat, now: float) -> list[str]:
        """An actor's own word of how it is. Returns the episodes granted to it that it has not
        heard of for longer than any message travels; they no longer count as played by it."""
        actor = self.connected.get(actor_id)
        if actor is None:
            return []
        actor.heartbeat = heartbeat
        actor.heard_at = now
        actor.ready = actor.ready or heartbeat.ready
        if heartbeat.held_leases is None:
            return []
        absent = actor.playing.difference(heartbeat.held_leases)
        actor.missing = {one: actor.missing.get(one, now) for one in absent}
        overdue = [
            episode_id
            for episode_id, since in actor.missing.items()
            if now - since > self._dead_after_s
        ]
        actor.playing.difference_update(overdue)
        return overdue

    def granted(self, actor_id: str, episode_ids: Iterable[str]) -> None:
        """This connected actor plays these from now on."""
        self.connected[actor_id].playing.update(episode_ids)

    def no_longer_plays(self, actor_id: str, episode_id: str) -> None:
        actor = self.connected.get(actor_id)
        if actor is not None:
            actor.playing.discard(episode_id)

    def free_slots(self, lowest: int, highest: int) -> dict[str, int]:
        """Room by actor, of those with weights of a version from `lowest` to `highest`."""
        return {
            actor_id: actor.capacity - len(actor.playing)
            for actor_id, actor in self.connected.items()
            if actor.ready and max(lowest, 0) <= actor.weights_version <= highest
        }

    def invitable(self, without_version: int | None, now: float) -> list[str]:
        """Actors whose engine is up; only those whose weights are not of that version, if given."""
        return [
            actor_id
            for actor_id, actor in self.connected.items()
            if actor.ready
            and now >= actor.invite_after
            and actor.weights_version != without_version
        ]

    def weights_arrived(self, report: BroadcastReport, now: float) -> None:
        """Dropped actors have no weights until a later broadcast reaches them."""
        for member in report.updated:
            actor = self.connected.get(member.actor_id)
            if actor is not None:
                actor.weights_version = report.version
        for actor_id, reason in report.dropped.items():
            actor = self.connected.get(actor_id)
            if actor is not None:
                actor.weights_version = -1
                actor.invite_after = now + (0.0 if reason == RECONNECTED else RETRY_WEIGHTS_S)

    def name_of(self, actor_id: str) -> str:
        """Its name, or its id if it is not connected."""
        actor = self.connected.get(actor_id)
        return actor.name if actor is not None else actor_id

    def names(self) -> dict[str, str]:
        """The names of the connected actors by id."""
        return {actor_id: actor.name for actor_id, actor in self.connected.items()}

    def take_overdue(self, now: float) -> list[str]:
        """The holders that did not come back in time; each is told once."""
        overdue = [actor_id for actor_id, limit in self._expected.items() if now > limit]
        for actor_id in overdue:
            del self._expected[actor_id]
        return overdue

    def may_return(self, now: float) -> bool:
        """Whether an actor of before may still look for this learner."""
        return bool(self._returning) and now < self._return_until

    def statuses(self, now: float) -> tuple[ActorStatus, ...]:
        """Every connected actor, for `capo status`."""
        return tuple(
            ActorStatus(
                actor_id=actor_id,
                name=actor.name,
                ready=actor.ready,
                weights_version=actor.weights_version,
                playing=len(actor.playing),
                capacity=actor.capacity,
                waiting_for=actor.heartbeat.waiting_for,
                silent_s=now - actor.heard_at,
                connected_s=now - actor.connected_at,
                metrics=actor.heartbeat.metrics,
            )
            for actor_id, actor in self.connected.items()
        )
