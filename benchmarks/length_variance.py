"""How the variance of an action's centred log-ratio sum grows with its length.

    python -m benchmarks.length_variance [--run RUN [--update K ...]] [--output DIR]

Figure 6 of CAPO (arXiv 2604.18401). Left: the variance of sum(z - mu), and the exponent of its
growth, which the paper measured as .90; independent tokens give 1. Right: the mean log-ratio,
which the plain square root pushes down as actions get longer and the restored mean mu keeps level.
On synthetic z of two known laws, and with --run on the z of real updates from a run file.
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from msgspec import Struct

from benchmarks import _plots
from benchmarks._actions import Actions, Floats, from_run, synthetic
from capo.learner.action_metrics import variance_slope
from capo.protocol.errors import RunFileError

PAPER = 0.90
NEAR = 0.05
MIN_ACTIONS = 25  # of a length bin
RESAMPLES = 60
FORMS = {  # label and colour
    "capo": (r"CAPO: $\mu + \Sigma(z - \mu)/\sqrt{L}$", "#222222"),
    "square_root": (r"square root alone: $\Sigma z/\sqrt{L}$", "#c0392b"),
    "mean": (r"mean: $\Sigma z/L$", "#1f6fab"),
}


class Bin(Struct, frozen=True):
    lengths: tuple[int, int]  # shortest and longest in it
    mean_length: float
    actions: int
    variance: float  # of the centred sum
    mean_log_ratio: dict[str, float]  # by form of the ratio
    stderr_log_ratio: dict[str, float]


class Result(Struct, frozen=True):
    source: str
    actions: int
    doublings: float  # of the length, between its 5th and 95th percentile
    exponent: float
    exponent_stderr: float  # by bootstrap over actions
    near_paper: str  # "yes", "no" or "undecided"
    verdict: str
    bins: tuple[Bin, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", type=Path, help="a run's folder, or its run.sqlite")
    parser.add_argument("--update", type=int, nargs="+", default=(), help="default: the last one")
    parser.add_argument("--actions", type=int, default=50_000, help="synthetic actions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/figures"))
    arguments = parser.parse_args()
    drawn = [synthetic(exponent, arguments.actions, arguments.seed) for exponent in (1.0, 0.9)]
    try:
        if arguments.run is not None:
            drawn.append(from_run(arguments.run, arguments.update))
        results = [measure(actions, arguments.seed) for actions in drawn]
    except (ValueError, RunFileError) as error:
        parser.error(str(error))
    for result in results:
        print(f"{result.source}: {result.verdict}")
    _plots.save(arguments.output, "length_variance", draw(drawn, results), results)


def measure(actions: Actions, seed: int = 0) -> Result:
    """Raises ValueError if the lengths vary too little to speak of an exponent."""
    exponent = variance_slope(actions.centred_sum, actions.length)
    if exponent is None:
        raise ValueError(
            f"{actions.source}: {len(actions.length)} actions of {actions.length.min()} to"
            f" {actions.length.max()} tokens are too few, or too alike, for an exponent"
        )
    generator = np.random.default_rng(seed)
    resampled = []
    for _ in range(RESAMPLES):
        rows = generator.integers(0, len(actions.length), len(actions.length))
        slope = variance_slope(actions.centred_sum[rows], actions.length[rows])
        resampled.append(exponent if slope is None else slope)
    stderr = float(np.std(resampled))
    gap = abs(exponent - PAPER)
    near = "yes" if gap + 2 * stderr < NEAR else "no" if gap - 2 * stderr > NEAR else "undecided"
    words = {"yes": "near", "no": "not near", "undecided": "not told apart from, nor surely near,"}
    return Result(
        source=actions.source,
        actions=len(actions.length),
        doublings=actions.doublings,
        exponent=exponent,
        exponent_stderr=stderr,
        near_paper=near,
        verdict=(
            f"{actions.reservation}the variance of the centred sum grows as"
            f" length^{exponent:.2f} (± {stderr:.3f}),"
            f" {words[near]} the paper's {PAPER:.2f}"
        ),
        bins=tuple(_bin(actions, mask) for mask in _plots.length_bins(actions.length, MIN_ACTIONS)),
    )


def log_ratios(actions: Actions) -> dict[str, Floats]:
    """By form, in the order of FORMS -> [A] each."""
    forms = (
        actions.log_ratio(0.5),
        actions.z_sum / np.sqrt(actions.length),
        actions.z_sum / actions.length,
    )
    return dict(zip(FORMS, forms, strict=True))


def _bin(actions: Actions, mask: np.ndarray) -> Bin:
    length, count = actions.length[mask], int(mask.sum())
    ratios = {name: values[mask] for name, values in log_ratios(actions).items()}
    return Bin(
        lengths=(int(length.min()), int(length.max())),
        mean_length=float(length.mean()),
        actions=count,
        variance=float(actions.centred_sum[mask].var()),
        mean_log_ratio={name: float(values.mean()) for name, values in ratios.items()},
        stderr_log_ratio={
            name: float(values.std() / np.sqrt(count)) for name, values in ratios.items()
        },
    )


def draw(drawn: list[Actions], results: list[Result]) -> Figure:
    figure, axes = _plots.panels(len(results), 2)
    for (left, right), actions, result in zip(axes, drawn, results, strict=True):
        x = np.array([one.mean_length for one in result.bins])
        variance = np.array([one.variance for one in result.bins])
        weight = np.array([one.actions for one in result.bins])
        level = np.average(np.log(variance) - result.exponent * np.log(x), weights=weight)
        paper = np.average(np.log(variance) - PAPER * np.log(x), weights=weight)
        left.plot(x, variance, "o", color="#222222", markersize=4, label="variance in a length bin")
        left.plot(
            x, np.exp(level) * x**result.exponent, color="#222222", linewidth=1.5,
            label=f"length^{result.exponent:.2f} (± {result.exponent_stderr:.3f})",
        )  # fmt: skip
        left.plot(
            x, np.exp(paper) * x**PAPER, color="#c0392b", linestyle="--", linewidth=1.5,
            label=f"the paper's length^{PAPER:.2f}",
        )  # fmt: skip
        left.set_yscale("log")
        left.set_ylabel(r"Var $\Sigma(z - \mu)$")
        left.set_title(f"{result.source}\nvariance of the centred sum")
        left.legend(loc="upper left", fontsize=8.5)
        for name, (label, colour) in FORMS.items():
            y = np.array([one.mean_log_ratio[name] for one in result.bins])
            error = np.array([one.stderr_log_ratio[name] for one in result.bins])
            right.fill_between(x, y - error, y + error, color=colour, alpha=0.15, linewidth=0)
            right.plot(x, y, "o-", color=colour, markersize=3, linewidth=1.5, label=label)
        right.axhline(0, color=_plots.MUTED, linewidth=0.8)
        right.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
        right.set_ylabel("mean log w")
        right.set_title(f"{result.actions:,} actions\nmean log-ratio")
        for axis in (left, right):
            _plots.length_axis(axis, actions.length)
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(FORMS))
    return figure


if __name__ == "__main__":
    main()
