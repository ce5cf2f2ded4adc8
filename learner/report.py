"""`capo report`: what a run came to and where its time went, as text. No torch."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from capo.learner.run_reader import RunReader
from capo.learner.run_tables import EpisodeRow, UpdateRow
from capo.learner.text_table import text_table

CURVE_POINTS = 16
CURVES = {
    "success": "batch/outcome",
    "return": "batch/return",
    "out of range": "ratio/out_of_range",
    "mu": "policy/mu",
    "KL": "policy/kl",
    "staleness": "staleness/mean",
    "explained var": "critic/explained_variance",
    "tokens/s": "system/tokens_per_s",
}
PHASES = ("update", "sync", "wait")  # one after the other in the learner's main thread
LENGTH_EDGES = (64, 256, 1024, 4096)  # action tokens of an episode


def report_lines(run_dir: Path) -> Iterator[str]:
    """All sections, each with its heading; sections without content are left out."""
    with RunReader(run_dir) as reader, np.errstate(all="ignore"):  # means of whatever is recorded
        updates = [update for update in reader.updates() if update.status == "done"]
        episodes = reader.episodes()
        sections = {
            "Run": list(_run(reader, updates, episodes)),
            "Held-out success": list(_evaluations(reader)),
            "Curve (means over the updates since the row before)": list(_curve(updates)),
            "Where the time went": list(_phases(updates)),
            "Actors": list(_actors(reader)),
            "Training episodes by fate": list(_fates(episodes)),
            "Training episodes by length in action tokens": list(_lengths(episodes)),
        }
    for heading, lines in sections.items():
        if lines:
            yield from (heading, "=" * len(heading), *lines, "")


def _run(
    reader: RunReader, updates: Sequence[UpdateRow], episodes: Sequence[EpisodeRow]
) -> Iterator[str]:
    config, facts = reader.config(), reader.facts()
    yield f"{config.name}, seed {config.seed}, algorithm {config.algorithm.preset}"
    yield f"run id {facts.get('run_id', '?')}, file {reader.path}"
    yield f"{len(updates)} of {config.updates} updates, {len(episodes)} episodes ended"
    if updates:
        first, last = updates[0].taken_at, updates[-1].done_at or updates[-1].taken_at
        begun = datetime.fromtimestamp(first, UTC).strftime("%Y-%m-%d %H:%M:%S")
        yield f"first update {begun} UTC, last one {_duration(last - first)} later"
    yield from _too_long(updates)


def _too_long(updates: Sequence[UpdateRow]) -> Iterator[str]:
    """What `rollout.on_overlong` did to the episodes that were trained on; nothing if nothing."""
    ended, left_out = (
        sum(update.metrics.get(name, 0.0) for update in updates)
        for name in ("batch/overlong", "batch/dropped_messages")
    )
    if ended or left_out:
        yield (
            f"prompts too long for the model ended {ended:.0f} episode(s); "
            f"{left_out:.0f} message(s) were left out of others (rollout.on_overlong)"
        )


def _evaluations(reader: RunReader) -> Iterator[str]:
    rows = list[tuple[str, ...]]()
    for evaluation in reader.evaluations():
        for mode, found in evaluation.results.items():
            rows.append(
                (
                    f"version {evaluation.version}, {mode}",
                    f"{found.success:.1%} ± {found.success_stderr:.1%}",
                    f"{found.mean_return:.3f}",
                    f"{found.mean_steps:.1f}",
                    str(found.episodes),
                    str(found.given_up),
                )
            )
    yield from text_table(("", "success", "return", "steps", "games", "given up"), rows)


def _curve(updates: Sequence[UpdateRow]) -> Iterator[str]:
    """Bins of consecutive updates; the mean of each metric over a bin."""
    if not updates:
        return
    rows = list[tuple[str, ...]]()
    for places in np.array_split(np.arange(len(updates)), min(CURVE_POINTS, len(updates))):
        part = [updates[place].metrics for place in places]
        cells = list[str]()
        for metric in CURVES.values():
            values = [metrics[metric] for metrics in part if metric in metrics]
            cells.append(f"{np.mean(values):.4g}" if values else "")
        rows.append((str(updates[places[-1]].version + 1), *cells))
    yield from text_table(("after update", *CURVES), rows)


def _phases(updates: Sequence[UpdateRow]) -> Iterator[str]:
    """Total seconds per phase, the parts of an update below it."""
    seconds = defaultdict[str, float](float)
    for update in updates:
        for name, value in update.metrics.items():
            if name.startswith("time/") and np.isfinite(value):
                seconds[name.removeprefix("time/").removesuffix("_s")] += value
    whole = sum(seconds[name] for name in PHASES) or 1.0
    parts = sorted(
        (name for name in seconds if name not in PHASES), key=lambda name: -seconds[name]
    )
    order = [(name, name) for name in PHASES]
    order[1:1] = [(f"  {name}", name) for name in parts]
    rows = [
        (
            label,
            f"{seconds[name]:.1f} s",
            f"{seconds[name] / len(updates):.3f} s",
            f"{seconds[name] / whole:.1%}",
        )
        for label, name in order
        if seconds[name]
    ]
    yield from text_table(("phase", "in all", "per update", "share"), rows)


def _actors(reader: RunReader) -> Iterator[str]:
    rows = [
        (
            actor.name or actor.actor_id,
            str(actor.num_leases),
            str(actor.num_episodes),
            str(actor.num_action_tokens),
            _duration(actor.last_seen - actor.first_seen),
        )
        for actor in reader.actors()
    ]
    yield from text_table(("actor", "leases", "episodes", "action tokens", "seen for"), rows)


def _fates(episodes: Sequence[EpisodeRow]) -> Iterator[str]:
    """Every training episode that ended is trained on, waiting, or excluded for a reason."""
    by_fate = defaultdict[str, list[EpisodeRow]](list)
    for episode in episodes:
        if episode.purpose == "train":
            by_fate[fate(episode)].append(episode)
    total = sum(len(rows) for rows in by_fate.values())
    rows: list[tuple[str, ...]] = [
        (
            name,
            str(len(found)),
            f"{len(found) / total:.1%}",
            f"{np.mean([episode.num_steps for episode in found]):.1f}",
            str(sum(episode.num_action_tokens for episode in found)),
            next((episode.error for episode in reversed(found) if episode.error), "")[:80],
        )
        for name, found in sorted(by_fate.items(), key=lambda item: -len(item[1]))
    ]
    header: tuple[str, ...] = ("fate", "episodes", "share", "steps", "tokens", "last error")
    if not any(row[-1] for row in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    yield from text_table(header, rows)


def _lengths(episodes: Sequence[EpisodeRow]) -> Iterator[str]:
    """Whether long episodes are trained on as often as short ones, or thrown away as stale."""
    ended = [
        episode
        for episode in episodes
        if episode.purpose == "train" and fate(episode) in ("trained on", "stale")
    ]
    bins = np.digitize([episode.num_action_tokens for episode in ended], LENGTH_EDGES)
    rows = list[tuple[str, ...]]()
    for place in range(len(LENGTH_EDGES) + 1):
        found = [ended[index] for index in np.flatnonzero(bins == place)]
        if found:
            stale = sum(fate(episode) == "stale" for episode in found)
            success = np.mean([episode.outcome for episode in found])
            rows.append(
                (
                    _bin_name(place),
                    str(len(found)),
                    str(stale),
                    f"{stale / len(found):.1%}",
                    f"{success:.1%}",
                )
            )
    if len(rows) > 1 or any(fate(episode) == "stale" for episode in ended):
        yield from text_table(("tokens", "episodes", "stale", "share", "success"), rows)


def fate(episode: EpisodeRow) -> str:
    """ "trained on", "waiting", or why it was excluded."""
    if episode.consumed_by is not None:
        return "trained on"
    return episode.excluded or "waiting"


def _bin_name(place: int) -> str:
    if place == 0:
        return f"below {LENGTH_EDGES[0]}"
    if place == len(LENGTH_EDGES):
        return f"from {LENGTH_EDGES[-1]}"
    return f"{LENGTH_EDGES[place - 1]} to {LENGTH_EDGES[place] - 1}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
