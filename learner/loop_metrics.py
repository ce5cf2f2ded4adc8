"""What is measured around an update: waiting, what was thrown away, the engines, the actors.

Names: docs/metrics.md. What is undefined is absent.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from capo.learner.action_metrics import length_labels
from capo.learner.scheduler_status import Batch
from capo.learner.status_file import ActorStatus
from capo.learner.weights import BroadcastReport


def waiting_metrics(
    waited_s: float, elapsed_s: float, trained_tokens: float, queue_ages_s: Sequence[float]
) -> dict[str, float]:
    """`elapsed_s` since the update before, of which the learner waited `waited_s` for the batch.
    `queue_ages_s`: how long each of its episodes had lain there when it was taken."""
    elapsed_s = max(elapsed_s, 1e-9)
    metrics = {
        "time/wait_s": waited_s,
        "system/tokens_per_s": trained_tokens / elapsed_s,
        "system/idle_fraction": min(waited_s / elapsed_s, 1.0),
    }
    if queue_ages_s:
        ages = np.maximum(queue_ages_s, 0.0)  # the system's clock may have been set back
        metrics |= {"queue/age_s_mean": float(ages.mean()), "queue/age_s_max": float(ages.max())}
    return metrics


def discard_metrics(batch: Batch) -> dict[str, float]:
    """What was not trained on since the batch before; of stale episodes the lengths, too."""
    tokens = np.array(batch.stale_tokens, dtype=np.int64)
    metrics = {
        "batch/flat_groups": float(batch.flat_groups),
        "staleness/discarded": float(len(tokens)),
    }
    if len(tokens):
        by_length = Counter(length_labels(tokens))
        metrics |= {
            "staleness/discarded_tokens_mean": float(tokens.mean()),
            "staleness/discarded_tokens_max": float(tokens.max()),
            **{f"staleness/discarded/length_{one}": float(by_length[one]) for one in by_length},
        }
    return metrics


def sync_metrics(report: BroadcastReport | None) -> dict[str, float]:
    """How the weights came to the engines; nothing where no engine got them."""
    if report is None or not report.updated:
        return {}
    return {
        "sync/engines": float(len(report.updated)),
        "sync/dropped": float(len(report.dropped)),
        "sync/bytes": float(report.num_bytes),
        "sync/form_s": report.form_s,
        "sync/transfer_s": report.transfer_s,
        "sync/pause_s_max": max(member.pause_s for member in report.updated),
        "sync/probe_gap_max": max(member.probe_gap for member in report.updated),
    }


def actor_metrics(actors: Sequence[ActorStatus]) -> dict[str, float]:
    """How many actors there are, and how busy those are that have said so."""
    busy = [one.metrics["busy_fraction"] for one in actors if "busy_fraction" in one.metrics]
    return {
        "actors/connected": float(len(actors)),
        "actors/playing": float(sum(one.playing for one in actors)),
        **({"actors/busy_fraction": sum(busy) / len(busy)} if busy else {}),
    }
