"""What a replay found, as lines of text for a person. No torch."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from capo.learner.replay_record import Replayed
from capo.learner.results import MinibatchResult, UpdateResult
from capo.learner.text_table import text_table

Read = Callable[[UpdateResult], list[object]]
MAX_DIFFERENCES = 10


def replay_lines(replayed: Replayed) -> Iterator[str]:
    """The verdict first, then what was compared."""
    yield verdict(replayed)
    yield ""
    if replayed.overrides:
        yield from text_table(
            ("", "recorded", f"with {', '.join(replayed.overrides)}"), _side_by_side(replayed)
        )
        return
    yield from text_table(("quantity", "values", ""), _equalities(replayed))
    for difference in replayed.differences[:MAX_DIFFERENCES]:
        yield f"{difference.name}: recorded {difference.recorded}, now {difference.replayed}"
    rest = len(replayed.differences) - MAX_DIFFERENCES
    if rest > 0:
        yield f"... and {rest} more differences"


def verdict(replayed: Replayed) -> str:
    """One sentence: whether the bits are the recorded ones, or what the table below shows."""
    repeated = replayed.version - replayed.started_from
    between = "1 update" if repeated == 1 else f"{repeated} updates"
    way = f"from version {replayed.started_from}, {between} in between" if repeated else ""
    name = f"Update {replayed.version}" + (f" ({way})" if way else "")
    if replayed.diverged_at is not None:
        return (
            f"{name}: the repetition left the recorded path at update {replayed.diverged_at}. "
            f"Bits are promised on the same kind of machine with the same versions only."
        )
    if replayed.overrides:
        return f"{name}: what would have been different."
    if not replayed.differences:
        return f"{name} came out bit for bit as recorded."
    return f"{name} came out DIFFERENTLY in {len(replayed.differences)} places."


def _equalities(replayed: Replayed) -> list[tuple[str, ...]]:
    rows = list[tuple[str, ...]]()
    for name, read in _QUANTITIES.items():
        recorded, again = _flat(read(replayed.recorded)), _flat(read(replayed.replayed))
        if not len(recorded) and not len(again):
            continue
        if recorded.shape != again.shape:
            rows.append((name, str(len(recorded)), f"now {len(again)} values"))
            continue
        changed = int((recorded.view(np.int64) != again.view(np.int64)).sum())
        said = "equal bit for bit" if not changed else f"{changed} differ"
        rows.append((name, str(len(recorded)), said))
    return rows


def _side_by_side(replayed: Replayed) -> list[tuple[str, ...]]:
    pair = (replayed.recorded, replayed.replayed)
    rows = [
        (name, *(_mean(_flat(read(result))) for result in pair))
        for name, read in _QUANTITIES.items()
    ]
    names = sorted({*pair[0].metrics, *pair[1].metrics})
    rows += [
        (name, *(_number(result.metrics.get(name)) for result in pair))
        for name in names
        if name.count("/") == 1 and pair[0].metrics.get(name) != pair[1].metrics.get(name)
    ]
    return [row for row in rows if row[1:] != ("", "")]


def _flat(values: Sequence[object]) -> NDArray[np.float64]:
    arrays = [np.atleast_1d(np.asarray(one, np.float64)) for one in values if one is not None]
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _mean(values: NDArray[np.float64]) -> str:
    return _number(float(values.mean())) if len(values) else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _of_minibatches(read: Callable[[MinibatchResult], object]) -> Read:
    return lambda result: [read(one) for one in result.minibatches]


_QUANTITIES: dict[str, Read] = {
    "advantage": lambda result: [result.actions.advantage],
    "return": lambda result: [result.actions.returns],
    "value": lambda result: [result.actions.value],
    "behaviour weight": lambda result: [result.actions.weight],
    "ratio": _of_minibatches(lambda one: one.ratio),
    "out of range": _of_minibatches(lambda one: one.out_of_range),
    "mu": _of_minibatches(lambda one: one.mu),
    "policy loss": _of_minibatches(lambda one: one.policy_loss),
    "KL": _of_minibatches(lambda one: one.kl),
    "policy gradient norm": _of_minibatches(lambda one: one.policy_grad_norm),
    "critic loss": _of_minibatches(lambda one: one.critic_loss),
    "critic gradient norm": _of_minibatches(lambda one: one.critic_grad_norm),
}
