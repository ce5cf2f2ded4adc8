"""What the engines' reports on a broadcast prove: who has the weights, and who is to be dropped."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from capo.protocol.messages import UpdateWeights, WeightsReport


class MemberReport(Struct, frozen=True):
    """One engine that has the new weights. `probe_gap` is in nats, the largest over the probe."""

    actor_id: str
    pause_s: float
    probe_gap: float


class Verdict(Struct, frozen=True):
    """`failed` are to be dropped and why; `broke_off` only suffered from another's end."""

    updated: tuple[MemberReport, ...]
    failed: Mapping[str, str]
    broke_off: Mapping[str, str]


def judge(
    members: Sequence[str],
    update: UpdateWeights,
    reports: Mapping[str, WeightsReport],
    lost: Mapping[str, str],
) -> Verdict:
    """After the time for reports: who of `members` took `update`. `lost` are gone, and why."""
    updated: list[MemberReport] = []
    failed = {actor: lost[actor] for actor in members if actor in lost}
    broke_off: dict[str, str] = {}
    somebody_lost = bool(failed)
    for actor in members:
        report = reports.get(actor)
        if actor in lost:
            continue
        if report is None:
            if somebody_lost:
                broke_off[actor] = "another member was lost in the transfer"
            else:
                failed[actor] = f"did not report on the weights within {update.timeout_s:g} s"
        elif report.error and report.broke_off:
            broke_off[actor] = report.error
        elif report.error:
            failed[actor] = report.error
        elif fault := report_fault(report, update):
            failed[actor] = fault
        else:
            updated.append(MemberReport(actor, report.pause_s, _gap(report, update)))
    return Verdict(tuple(updated), failed, broke_off)


def report_fault(report: WeightsReport, update: UpdateWeights) -> str:
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
