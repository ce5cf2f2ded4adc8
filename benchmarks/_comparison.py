"""What the runs of a comparison came to, read from their run files: numbers, table, figure.

U updates, S seeds. Knows nothing of how the runs were made.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from msgspec import Struct
from numpy.typing import NDArray

from benchmarks import _plots
from capo.configs.algorithms import needs_critic
from capo.launch.outcome import evaluations_of
from capo.learner.evaluation_round import ModeResult
from capo.learner.run_reader import RunReader

WINDOW = 10  # updates a learning curve is averaged over
COLUMNS = 3  # of the figure
COLOUR = "#1f6fab"


class Run(Struct, frozen=True, kw_only=True):
    """A finished run. `before` and `after` are evaluations on held-out games, by mode of play."""

    algorithm: str
    seed: int
    critic: bool
    clip: tuple[float, float]
    batch_episodes: int
    success: tuple[float, ...]  # [U], of the training episodes of every update
    minutes: float  # from the first batch to the last update's end
    before: dict[str, ModeResult]
    after: dict[str, ModeResult]

    @property
    def episodes(self) -> int:
        return self.batch_episodes * len(self.success)


class Summary(Struct, frozen=True, kw_only=True):
    """One algorithm over its seeds. Spreads are standard deviations with ddof 1, 0 for one seed."""

    algorithm: str
    seeds: tuple[int, ...]
    sampled: tuple[float, ...]  # success on held-out games after training, by seed
    greedy: tuple[float, ...]
    training: tuple[float, ...]  # mean success over all training episodes, by seed
    minutes: float  # mean
    gap: tuple[float, ...]  # sampled, minus that of the first algorithm with the same seed


def is_finished(run_dir: Path) -> bool:
    """All updates are done and the evaluation after the last of them is recorded."""
    with RunReader(run_dir) as reader:
        updates = reader.config().updates
        done = sum(update.status == "done" for update in reader.updates())
        return done == updates and any(at == updates for at, _ in evaluations_of(reader))


def read_run(run_dir: Path) -> Run:
    """Raises ValueError if the run is not finished, or was not evaluated at its start."""
    if not is_finished(run_dir):
        raise ValueError(f"the run in {run_dir} is not finished")
    with RunReader(run_dir) as reader:
        config = reader.config()
        updates = reader.updates()
        evaluations = dict(evaluations_of(reader))
    if 0 not in evaluations:
        raise ValueError(f"the run in {run_dir} has no evaluation at version 0")
    ended = [update.done_at or update.taken_at for update in updates]
    return Run(
        algorithm=config.algorithm.preset,
        seed=config.seed,
        critic=needs_critic(config.algorithm),
        clip=(config.algorithm.clip_low, config.algorithm.clip_high),
        batch_episodes=config.learner.batch_episodes,
        success=tuple(update.metrics["batch/outcome"] for update in updates),
        minutes=(max(ended) - updates[0].taken_at) / 60,
        before=evaluations[0],
        after=evaluations[config.updates],
    )


def summarise(runs: Sequence[Run]) -> list[Summary]:
    """In the order in which algorithms first appear; gaps are to the first of them."""
    names = list(dict.fromkeys(run.algorithm for run in runs))
    baseline = {run.seed: _success(run, "sampled") for run in runs if run.algorithm == names[0]}
    return [_summary(name, [run for run in runs if run.algorithm == name], baseline)
            for name in names]  # fmt: skip


def objections(runs: Sequence[Run]) -> list[str]:
    """Why these runs may not be compared as they are; empty if nothing speaks against it."""
    found = []
    if len({run.episodes for run in runs}) > 1:
        numbers = ", ".join(sorted({str(run.episodes) for run in runs}))
        found.append(f"the runs did not train on equally many episodes, but on {numbers}")
    for seed in sorted({run.seed for run in runs}):
        starts = {run.before["greedy"].success for run in runs if run.seed == seed}
        if len(starts) > 1:
            named = ", ".join(f"{start:.3f}" for start in sorted(starts))
            found.append(
                f"the runs of seed {seed} did not start alike: greedy success was {named} before"
            )
    seeds = {run.algorithm: 0 for run in runs}
    for run in runs:
        seeds[run.algorithm] += 1
    if min(seeds.values()) < 3:
        few = ", ".join(f"{name} {count}" for name, count in seeds.items() if count < 3)
        found.append(f"fewer than three seeds: {few}")
    return found


def table(runs: Sequence[Run]) -> str:
    """Markdown: what came out, in the order of success, and what speaks against trusting it."""
    summaries = summarise(runs)
    first = summaries[0].algorithm
    games = sorted({run.after["sampled"].episodes for run in runs})
    start = [f"{run.before['sampled'].success:.1%}" for run in runs if run.algorithm == first]
    lines = [
        f"Success on {'/'.join(map(str, games))} held-out games after {runs[0].episodes:,} training"
        f" episodes, mean ± standard deviation over seeds. The warm start's was {', '.join(start)}"
        f" (sampled, seed by seed).",
        "",
        f"| algorithm | critic | clip | seeds | sampled | greedy | while training |"
        f" against {first}, same seed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in sorted(summaries, key=lambda summary: -mean(summary.sampled)):
        (sample, *_) = (run for run in runs if run.algorithm == one.algorithm)
        lines.append(
            f"| `{one.algorithm}` | {'yes' if sample.critic else 'no'} | {_clip(sample)} |"
            f" {len(one.seeds)} | {_spread(one.sampled)} | {_spread(one.greedy)} |"
            f" {_spread(one.training)} | {_gap(one, first)} |"
        )
    by_seed = [
        f"{one.algorithm} "
        + ", ".join(f"{s}: {x:.1%}" for s, x in zip(one.seeds, one.sampled, strict=True))
        for one in summaries
    ]
    lines += ["", f"Sampled success seed by seed: {'; '.join(by_seed)}."]
    lines += [f"**Mind:** {objection}." for objection in objections(runs)]
    return "\n".join(lines) + "\n"


def smoothed(values: Sequence[float], window: int = WINDOW) -> NDArray[np.float64]:
    """Mean of each value and up to `window` - 1 before it -> [U]."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - window, 0)
    means: NDArray[np.float64] = (total[last] - total[first]) / (last - first)
    return means


def draw(runs: Sequence[Run]) -> Figure:
    """Small multiples: an algorithm's seeds, mean and spread in front of the others' means."""
    names = list(dict.fromkeys(run.algorithm for run in runs))
    columns = min(COLUMNS, len(names))
    rows = -(-len(names) // columns)
    figure, axes = _plots.panels(rows, columns, width=3.5, height=2.7)
    curves = {name: _curves([run for run in runs if run.algorithm == name]) for name in names}
    for axis, name in zip(axes.flat, names, strict=False):
        _panel(axis, name, curves)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    for axis in axes[:, 0]:
        axis.set_ylabel("success while training")
    for axis in axes.flat[max(len(names) - columns, 0) : len(names)]:  # the lowest of each column
        axis.set_xlabel("training episodes")
    return figure


def _panel(axis: Axes, name: str, curves: Mapping[str, tuple[NDArray[np.float64], ...]]) -> None:
    for other, (x, ys) in curves.items():
        if other != name:
            axis.plot(x, ys.mean(axis=0), color="#c9c9c9", linewidth=1.1, zorder=1)
    x, ys = curves[name]
    axis.fill_between(
        x, ys.min(axis=0), ys.max(axis=0), color=COLOUR, alpha=0.18, linewidth=0, zorder=2
    )
    for y in ys:
        axis.plot(x, y, color=COLOUR, linewidth=0.6, alpha=0.7, zorder=3)
    axis.plot(x, ys.mean(axis=0), color=COLOUR, linewidth=2.2, zorder=4)
    axis.set_ylim(0, 1)
    axis.set_title(f"{name}, {len(ys)} seed{'s' if len(ys) > 1 else ''}")


def _curves(runs: Sequence[Run]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Episodes [U] and smoothed success [S, U], up to the shortest of the runs."""
    num_updates = min(len(run.success) for run in runs)
    x: NDArray[np.float64] = runs[0].batch_episodes * np.arange(
        1, num_updates + 1, dtype=np.float64
    )
    return x, np.stack([smoothed(run.success)[:num_updates] for run in runs])


def _summary(name: str, runs: Sequence[Run], baseline: Mapping[int, float]) -> Summary:
    sampled = tuple(_success(run, "sampled") for run in runs)
    return Summary(
        algorithm=name,
        seeds=tuple(run.seed for run in runs),
        sampled=sampled,
        greedy=tuple(_success(run, "greedy") for run in runs),
        training=tuple(mean(run.success) for run in runs),
        minutes=mean(run.minutes for run in runs),
        gap=tuple(
            success - baseline[run.seed]
            for run, success in zip(runs, sampled, strict=True)
            if run.seed in baseline
        ),
    )


def _success(run: Run, mode: str) -> float:
    return run.after[mode].success


def _spread(values: Sequence[float]) -> str:
    deviation = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.1f}{deviation} %"


def _gap(summary: Summary, first: str) -> str:
    if summary.algorithm == first or not summary.gap:
        return "-"
    deviation = f" ± {100 * stdev(summary.gap):.1f}" if len(summary.gap) > 1 else ""
    return f"{100 * mean(summary.gap):+.1f}{deviation}"


def _clip(run: Run) -> str:
    low, high = run.clip
    return f"{low:g}" if low == high else f"-{low:g}/+{high:g}"
