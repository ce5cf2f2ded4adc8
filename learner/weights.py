"""New weights to every engine: who is in the group, what is sent, who was left behind and why.

A state machine that knows no sockets of the wire: messages come in by `receive` and `lost` from
the server's thread, and go out by the `send` it was given; `broadcast` runs in the main thread and
waits on the same condition. Every wait has a limit and names whom it waited for.

A broadcast: invite all members; form a group with those that accept (unless the last group still
has exactly these members); send; collect the engines' own checks. A member that fails is dropped by
name and the rest go on in a new group. An engine whose check fails is dropped, never the run.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from capo.learner.scheduler_status import Wait
from capo.learner.weight_transfer import NamedTensors, Payload, WeightTransport
from capo.protocol.messages import (
    GroupAccept,
    GroupForm,
    GroupFormed,
    GroupInvite,
    UpdateWeights,
    WeightsReport,
)
from capo.protocol.records import FloatArray, IntArray

GRACE_S = 3.0  # a member's own time limit comes first, so that it can say what happened
MAX_BREAKS = 3  # transfers that break off without anybody to blame, before all are dropped

GroupMessage = GroupAccept | GroupFormed | WeightsReport


class MemberReport(Struct, frozen=True):
    """One engine that has the new weights. `probe_gap` is in nats, the largest over the probe."""

    actor_id: str
    pause_s: float
    probe_gap: float


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


class _Group(Struct, frozen=True):
    epoch: int
    members: tuple[str, ...]


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
        self._changed = threading.Condition()
        self._epoch = time.time_ns() // 1_000_000 if first_epoch is None else first_epoch
        self._group: _Group | None = None
        self._accepted: dict[str, GroupAccept] = {}
        self._formed: dict[str, GroupFormed] = {}
        self._reports: dict[str, WeightsReport] = {}
        self._lost: dict[str, str] = {}
        self._expecting: tuple[str, Sequence[str], Mapping[str, object], float] | None = None

    def receive(self, actor_id: str, message: GroupMessage) -> None:
        """From any thread. What belongs to an earlier epoch is ignored."""
        with self._changed:
            if message.epoch != self._epoch:
                return
            if isinstance(message, GroupAccept):
                self._accepted[actor_id] = message
            elif isinstance(message, GroupFormed):
                self._formed[actor_id] = message
            else:
                self._reports[actor_id] = message
            self._changed.notify_all()

    def lost(self, actor_id: str, reason: str) -> None:
        """From any thread: this actor is gone, its place in the group with it."""
        with self._changed:
            self._lost[actor_id] = reason
            if self._group is not None and actor_id in self._group.members:
                self._group = None
            self._changed.notify_all()

    def waits(self) -> list[Wait]:
        """Whom a broadcast that goes on waits for, for `capo status`. From any thread."""
        with self._changed:
            if self._expecting is None:
                return []
            what, members, answers, since = self._expecting
            since_s = self._clock() - since
            return [
                Wait(who="the broadcast", whom=f"actor {actor} {what}", since_s=since_s)
                for actor in members
                if actor not in answers and actor not in self._lost
            ]

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
        remaining = tuple(dict.fromkeys(members))
        updated: tuple[MemberReport, ...] = ()
        dropped: dict[str, str] = {}
        stage_s = form_s = transfer_s = 0.0
        payload = Payload((), 0, "")
        if remaining:
            with self._changed:
                self._lost.clear()
            started = self._clock()
            payload = self._transport.stage(tensors)
            stage_s = self._clock() - started
        deadline = self._clock() + 2 * (
            self._limits.join_timeout_s + self._limits.transfer_timeout_s + GRACE_S
        )
        breaks = 0
        while remaining:
            if self._clock() >= deadline:
                dropped |= dict.fromkeys(remaining, "the broadcast as a whole took too long")
                break
            started = self._clock()
            group, failed = self._group_of(remaining)
            form_s += self._clock() - started
            dropped |= failed
            remaining = tuple(actor for actor in remaining if actor not in failed)
            if group is None:
                continue
            update = self._update(group, version, payload, probe, probe_logprobs)
            started = self._clock()
            updated, failed, broke_off = self._transfer(group, update)
            transfer_s += self._clock() - started
            if failed or broke_off:
                self._group = None
                self._transport.abort()
            dropped |= failed
            remaining = tuple(actor for actor in remaining if actor not in failed)
            if not broke_off:
                break
            breaks += not failed
            if breaks == MAX_BREAKS:
                dropped |= broke_off
                break
        self._expecting = None
        return BroadcastReport(
            version=version,
            epoch=self._epoch,
            updated=tuple(report for report in updated if report.actor_id not in dropped),
            dropped=dropped,
            num_bytes=payload.num_bytes,
            stage_s=stage_s,
            form_s=form_s,
            transfer_s=transfer_s,
        )

    def close(self) -> None:
        with self._changed:
            self._group = None
        self._transport.close()

    def _group_of(self, members: tuple[str, ...]) -> tuple[_Group | None, dict[str, str]]:
        """A group of these members, or None and who is to blame for that."""
        with self._changed:
            group = self._group
            if group is not None and set(group.members) == set(members):
                self._reports.clear()
                return group, {}
            self._group = None
            self._epoch += 1
            epoch = self._epoch
            self._accepted.clear()
            self._formed.clear()
            self._reports.clear()
        for actor in members:
            self._send(actor, GroupInvite(epoch=epoch))
        timeout_s = self._limits.join_timeout_s
        self._expecting = ("to accept the weight group", members, self._accepted, self._clock())
        self._wait(lambda: all(a in self._accepted or a in self._lost for a in members), timeout_s)
        with self._changed:
            missing = {
                actor: self._lost.get(
                    actor, f"did not answer the invitation to the weight group in {timeout_s:g} s"
                )
                for actor in members
                if actor not in self._accepted or actor in self._lost
            }
            workers = {actor: accept.workers for actor, accept in self._accepted.items()}
        present = tuple(actor for actor in members if actor not in missing)
        if not present:
            return None, missing
        group, failed = self._form(epoch, present, workers)
        return group, missing | failed

    def _form(
        self, epoch: int, members: tuple[str, ...], workers: Mapping[str, int]
    ) -> tuple[_Group | None, dict[str, str]]:
        ranks: dict[str, int] = {}
        world_size = 1
        for actor in members:
            ranks[actor] = world_size
            world_size += workers[actor]
        timeout_s = self._limits.join_timeout_s
        host, port = self._transport.endpoint()
        for actor in members:
            form = GroupForm(
                epoch=epoch,
                transport=self._transport.name,
                host=host,
                port=port,
                rank=ranks[actor],
                world_size=world_size,
                timeout_s=timeout_s,
            )
            self._send(actor, form)
        own = self._start(lambda: self._transport.form(epoch, world_size, timeout_s))
        self._expecting = ("to join the weight group", members, self._formed, self._clock())
        self._wait(
            lambda: (
                any(actor in self._lost for actor in members)
                or any(formed.error for formed in self._formed.values())
                or (own.done and all(actor in self._formed for actor in members))
            ),
            timeout_s + GRACE_S,
        )
        with self._changed:
            failed = {actor: self._lost[actor] for actor in members if actor in self._lost}
            formed = dict(self._formed)
        stands = all(actor in formed and not formed[actor].error for actor in members)
        if own.done and not own.error and stands and not failed:
            group = _Group(epoch, members)
            with self._changed:
                self._group = group
            return group, {}
        failed |= {a: f.error for a, f in formed.items() if not f.reached and a in members}
        if not failed:
            silent = [a for a in members if not self._transport.arrived(epoch, ranks[a])]
            failed = {
                actor: formed[actor].error
                if actor in formed and formed[actor].error
                else f"did not come to the weight group within {timeout_s:g} s"
                for actor in silent
            }
        if not failed:
            failed = {a: formed[a].error for a in members if a in formed and formed[a].error}
        if not failed:
            failed = dict.fromkeys(members, own.error or "the weight group was not formed in time")
        self._transport.abort()
        return None, failed

    def _update(
        self,
        group: _Group,
        version: int,
        payload: Payload,
        probe: IntArray,
        probe_logprobs: FloatArray,
    ) -> UpdateWeights:
        return UpdateWeights(
            epoch=group.epoch,
            version=version,
            tensors=payload.tensors,
            bucket_bytes=self._limits.bucket_bytes,
            checksum=payload.checksum,
            probe=probe,
            probe_logprobs=probe_logprobs,
            probe_tolerance=self._limits.probe_tolerance,
            timeout_s=self._limits.transfer_timeout_s,
        )

    def _transfer(
        self, group: _Group, update: UpdateWeights
    ) -> tuple[tuple[MemberReport, ...], dict[str, str], dict[str, str]]:
        """Who has the weights, who is to be dropped, and who only suffered from another's end."""
        members = group.members
        for actor in members:
            self._send(actor, update)
        timeout_s = self._limits.transfer_timeout_s
        deadline = self._clock() + timeout_s + GRACE_S
        own = self._start(lambda: self._transport.send(update.bucket_bytes, timeout_s))
        self._expecting = ("to report on the weights", members, self._reports, self._clock())

        def all_told() -> bool:
            return all(actor in self._reports or actor in self._lost for actor in members)

        self._wait(
            lambda: (
                own.error != ""
                or any(actor in self._lost for actor in members)
                or (own.done and all_told())
            ),
            deadline - self._clock(),
        )
        if own.error:
            # Nobody shall wait for pieces that will not come; who then still says nothing is dead.
            self._transport.abort()
            self._wait(all_told, deadline - self._clock())
        with self._changed:
            lost = {actor: self._lost[actor] for actor in members if actor in self._lost}
            reports = dict(self._reports)
        updated = []
        failed = dict(lost)
        broke_off: dict[str, str] = {}
        for actor in members:
            report = reports.get(actor)
            if actor in lost:
                continue
            if report is None:
                if lost:
                    broke_off[actor] = "another member was lost in the transfer"
                else:
                    failed[actor] = f"did not report on the weights within {timeout_s:g} s"
            elif report.error and report.broke_off:
                broke_off[actor] = report.error
            elif report.error:
                failed[actor] = report.error
            elif fault := _report_fault(report, update):
                failed[actor] = fault
            else:
                updated.append(MemberReport(actor, report.pause_s, _gap(report, update)))
        return tuple(updated), failed, broke_off

    def _start(self, work: Callable[[], None]) -> "_Background":
        background = _Background(work, self._changed)
        background.start()
        return background

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        deadline = self._clock() + timeout_s
        with self._changed:
            while not done():
                left = deadline - self._clock()
                if left <= 0:
                    return
                self._changed.wait(min(left, 0.5))


class _Background(threading.Thread):
    """The transport's part, which blocks; `error` is a sentence once it is `done`."""

    def __init__(self, work: Callable[[], None], changed: threading.Condition) -> None:
        super().__init__(name="weight transfer", daemon=True)
        self._work = work
        self._changed = changed
        self.done = False
        self.error = ""

    def run(self) -> None:
        error = ""
        try:
            self._work()
        except Exception as caught:  # its end of the boundary: the waiting thread reads the text
            error = str(caught) or type(caught).__name__
        with self._changed:
            self.error = error
            self.done = True
            self._changed.notify_all()


def _report_fault(report: WeightsReport, update: UpdateWeights) -> str:
    """Why a report that claims success proves nothing, "" if it does prove it."""
    if report.version != update.version:
        return f"reports version {report.version}, but {update.version} was sent"
    given = 0 if report.probe_logprobs is None else len(report.probe_logprobs)
    if given != len(update.probe_logprobs):
        return f"reports {given} log-probs of a probe of {len(update.probe_logprobs)}"
    gap = _gap(report, update)
    if not gap <= update.probe_tolerance:  # NaN too
        return f"is {gap:.3g} nats off in the probe; {update.probe_tolerance:g} are allowed"
    return ""


def _gap(report: WeightsReport, update: UpdateWeights) -> float:
    if report.probe_logprobs is None or len(report.probe_logprobs) == 0:
        return 0.0
    return float(abs(report.probe_logprobs - update.probe_logprobs).max())
