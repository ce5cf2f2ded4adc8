"""New weights to every engine: who is in the group, what is sent, who was left behind and why.

A state machine that knows no sockets of the wire: messages come in by `receive` and `lost` from
the server's thread, and go out by the `send` it was given; `broadcast` runs in the main thread and
waits on the same condition. Every wait has a limit and names whom it waited for.

A broadcast: invite all members; form a group with those that accept (unless the last group still
has exactly these members); send; collect the engines' own checks. A member that fails is dropped by
name and the rest go on in a new group. An engine whose check fails is dropped, never the run.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Struct

from capo.learner.scheduler_status import Wait
from capo.learner.weight_answers import GRACE_S, Answers, Group, GroupMessage
from capo.learner.weight_group import GroupFormer
from capo.learner.weight_report import MemberReport, Verdict, judge
from capo.learner.weight_transfer import NamedTensors, Payload, WeightTransport
from capo.protocol.messages import GroupForm, GroupInvite, UpdateWeights
from capo.protocol.records import FloatArray, IntArray

MAX_BREAKS = 3  # transfers that break off without anybody to blame, before all are dropped


class BroadcastReport(Struct, frozen=True, kw_only=True):
    """`dropped` maps an actor to the sentence why it does not have these weights."""

    version: int
    epoch: int
    updated: tuple[MemberReport, ...]
    dropped: Mapping[str, str]
    num_bytes: int
    stage_s: float
    form_s: float
    transfer_s: float


class WeightLimits(Struct, frozen=True, kw_only=True):
    """How long a broadcast may wait, how it is cut, and how close the probe must come."""

    bucket_bytes: int
    join_timeout_s: float
    transfer_timeout_s: float
    probe_tolerance: float


class WeightBroadcaster:
    """One per run. `first_epoch` must not repeat that of an earlier process of the run."""

    def __init__(
        self,
        send: Callable[[str, GroupInvite | GroupForm | UpdateWeights], None],
        transport: WeightTransport,
        limits: WeightLimits,
        first_epoch: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._transport = transport
        self._limits = limits
        self._clock = clock
        epoch = time.time_ns() // 1_000_000 if first_epoch is None else first_epoch
        self._answers = Answers(epoch, clock)
        self._groups = GroupFormer(send, transport, self._answers, limits.join_timeout_s)

    def receive(self, actor_id: str, message: GroupMessage) -> None:
        """From any thread. What belongs to an earlier epoch is ignored."""
        self._answers.receive(actor_id, message)

    def lost(self, actor_id: str, reason: str) -> None:
        """From any thread: this actor is gone, its place in the group with it."""
        self._answers.lose(actor_id, reason)

    def waits(self) -> list[Wait]:
        """Whom a broadcast that goes on waits for, for `capo status`. From any thread."""
        return self._answers.waits()

    def broadcast(
        self,
        version: int,
        tensors: NamedTensors,
        members: Sequence[str],
        probe: IntArray,
        probe_logprobs: FloatArray,
    ) -> BroadcastReport:
        """Bring `version` to `members`; never raises for what a member does.

        `probe_logprobs` [len(probe) - 1] are the learner's own log-probs of `probe[1:]`. `tensors`
        is read once. Returns at once when there are no members.
        """
        course = _Course(members)
        payload = Payload((), 0, "")
        if course.remaining:
            with self._answers.changed:
                self._answers.lost.clear()
            started = self._clock()
            payload = self._transport.stage(tensors)
            course.stage_s = self._clock() - started
        update = UpdateWeights(
            epoch=self._answers.epoch,
            version=version,
            tensors=payload.tensors,
            bucket_bytes=self._limits.bucket_bytes,
            checksum=payload.checksum,
            probe=probe,
            probe_logprobs=probe_logprobs,
            probe_tolerance=self._limits.probe_tolerance,
            timeout_s=self._limits.transfer_timeout_s,
        )
        deadline = self._clock() + 2 * (
            self._limits.join_timeout_s + self._limits.transfer_timeout_s + GRACE_S
        )
        while course.remaining and not course.settled:
            if self._clock() < deadline:
                self._round(course, update)
            else:
                course.drop_all("the broadcast as a whole took too long")
        self._answers.ask_nothing()
        return course.report(version, self._answers.epoch, payload.num_bytes)

    def close(self) -> None:
        with self._answers.changed:
            self._answers.group = None
        self._transport.close()

    def _round(self, course: "_Course", update: UpdateWeights) -> None:
        """One group and one transfer to it."""
        started = self._clock()
        group, failed = self._groups.group_of(course.remaining)
        course.form_s += self._clock() - started
        course.drop(failed)
        if group is None:
            return
        started = self._clock()
        verdict = self._transfer(group, msgspec.structs.replace(update, epoch=group.epoch))
        course.transfer_s += self._clock() - started
        if verdict.failed or verdict.broke_off:
            self._answers.group = None
            self._transport.abort()
        course.take(verdict)

    def _transfer(self, group: Group, update: UpdateWeights) -> Verdict:
        members = group.members
        for actor in members:
            self._send(actor, update)
        answers = self._answers
        timeout_s = self._limits.transfer_timeout_s
        deadline = self._clock() + timeout_s + GRACE_S
        own = answers.start(lambda: self._transport.send(update.bucket_bytes, timeout_s))
        answers.ask("to report on the weights", members, answers.reports)

        def all_told() -> bool:
            return all(actor in answers.reports or actor in answers.lost for actor in members)

        answers.wait(
            lambda: (
                own.error != ""
                or any(actor in answers.lost for actor in members)
                or (own.done and all_told())
            ),
            deadline - self._clock(),
        )
        if own.error:
            # No member should wait for pieces that will not come; one silent after that is dead.
            self._transport.abort()
            answers.wait(all_told, deadline - self._clock())
        with answers.changed:
            return judge(members, update, answers.reports, answers.lost)


class _Course:
    """How far one broadcast has come."""

    def __init__(self, members: Sequence[str]) -> None:
        self.remaining = tuple(dict.fromkeys(members))
        self.settled = False
        self.stage_s = 0.0
        self.form_s = 0.0
        self.transfer_s = 0.0
        self._updated: tuple[MemberReport, ...] = ()
        self._dropped: dict[str, str] = {}
        self._breaks = 0

    def drop(self, failed: Mapping[str, str]) -> None:
        self._dropped |= failed
        self.remaining = tuple(actor for actor in self.remaining if actor not in failed)

    def drop_all(self, reason: str) -> None:
        self.drop(dict.fromkeys(self.remaining, reason))

    def take(self, verdict: Verdict) -> None:
        """Settled when nothing broke off, or too often with nobody to blame."""
        self._updated = verdict.updated
        self.drop(verdict.failed)
        self.settled = not verdict.broke_off
        if verdict.broke_off:
            self._breaks += not verdict.failed
            if self._breaks == MAX_BREAKS:
                self.drop(verdict.broke_off)
                self.settled = True

    def report(self, version: int, epoch: int, num_bytes: int) -> BroadcastReport:
        return BroadcastReport(
            version=version,
            epoch=epoch,
            updated=tuple(one for one in self._updated if one.actor_id not in self._dropped),
            dropped=self._dropped,
            num_bytes=num_bytes,
            stage_s=self.stage_s,
            form_s=self.form_s,
            transfer_s=self.transfer_s,
        )
