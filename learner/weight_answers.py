"""What the members of a broadcast have answered, told by one thread and awaited by another.

Everything here is behind one condition. Answers belong to the epoch of the latest weight group; the
group that stands is kept here too, because it falls as soon as one of its members is lost.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from capo.learner.scheduler_status import Wait
from capo.learner.weight_background import Background
from capo.protocol.messages import GroupAccept, GroupFormed, WeightsReport

GRACE_S = 3.0  # a member's own time limit comes first, so that it can say what happened

GroupMessage = GroupAccept | GroupFormed | WeightsReport


class Group(Struct, frozen=True):
    """A weight group that was formed."""

    epoch: int
    members: tuple[str, ...]


class _Question(Struct, frozen=True):
    """What is awaited, of whom, where the answers are put, and since when."""

    what: str
    members: Sequence[str]
    answers: Mapping[str, object]
    since: float


class Answers:
    """`accepted`, `formed`, `reports` are those of `epoch`; `lost` says why an actor is gone.

    Read them while `changed` is held, or inside what `wait` is given.
    """

    def __init__(self, epoch: int, clock: Callable[[], float]) -> None:
        self.changed = threading.Condition()
        self.epoch = epoch
        self.group: Group | None = None
        self.accepted: dict[str, GroupAccept] = {}
        self.formed: dict[str, GroupFormed] = {}
        self.reports: dict[str, WeightsReport] = {}
        self.lost: dict[str, str] = {}
        self._question: _Question | None = None
        self._clock = clock

    def receive(self, actor_id: str, message: GroupMessage) -> None:
        """An answer; one to another epoch is ignored."""
        with self.changed:
            if message.epoch != self.epoch:
                return
            if isinstance(message, GroupAccept):
                self.accepted[actor_id] = message
            elif isinstance(message, GroupFormed):
                self.formed[actor_id] = message
            else:
                self.reports[actor_id] = message
            self.changed.notify_all()

    def lose(self, actor_id: str, reason: str) -> None:
        """This actor is gone, and with it the group that it was a member of."""
        with self.changed:
            self.lost[actor_id] = reason
            if self.group is not None and actor_id in self.group.members:
                self.group = None
            self.changed.notify_all()

    def next_epoch(self) -> int:
        """No group stands any more, and answers to what came before are ignored from now on."""
        with self.changed:
            self.group = None
            self.epoch += 1
            self.accepted.clear()
            self.formed.clear()
            self.reports.clear()
            return self.epoch

    def lost_of(self, members: Sequence[str]) -> dict[str, str]:
        """Those of `members` that are gone, and why."""
        with self.changed:
            return {actor: self.lost[actor] for actor in members if actor in self.lost}

    def ask(self, what: str, members: Sequence[str], answers: Mapping[str, object]) -> None:
        """From now on `waits` names those of `members` that are not in `answers`."""
        self._question = _Question(what, members, answers, self._clock())

    def ask_nothing(self) -> None:
        self._question = None

    def waits(self) -> list[Wait]:
        """Whom the present question waits for, for `capo status`."""
        with self.changed:
            question = self._question
            if question is None:
                return []
            since_s = self._clock() - question.since
            return [
                Wait(who="the broadcast", whom=f"actor {actor} {question.what}", since_s=since_s)
                for actor in question.members
                if actor not in question.answers and actor not in self.lost
            ]

    def wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Until `done`, which is called with `changed` held, or until the time is over."""
        deadline = self._clock() + timeout_s
        with self.changed:
            while not done():
                left = deadline - self._clock()
                if left <= 0:
                    return
                self.changed.wait(min(left, 0.5))

    def start(self, work: Callable[[], None]) -> Background:
        """Do `work` in a thread; its end wakes every waiter."""
        background = Background(work, self.changed)
        background.start()
        return background
