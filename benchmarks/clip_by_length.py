"""Which actions leave the clip range, by their length, for every exponent alpha of the ratio.

    python -m benchmarks.clip_by_length [--run RUN [--update K ...]] [--output DIR]

Figure 3 of CAPO (arXiv 2604.18401): out of range and active fraction against action length for
w = exp(mu + sum(z - mu) / L^alpha). On synthetic z of two known laws (independent tokens, and the
paper's measured exponent .90), and with --run on the z of real updates from a run file. Says
whether alpha = .5 is flat: the out-of-range fraction changes by less than .02 per doubling of the
length, beyond two standard errors of doubt.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from msgspec import Struct

from benchmarks import _plots
from benchmarks._actions import DEFAULT_CLIP, Actions, Floats, from_run, synthetic
from capo.learner.clipping import clipped
from capo.protocol.errors import RunFileError

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
COLOURS = {0.0: "#c0392b", 0.25: "#e8926f", 0.5: "#222222", 0.75: "#7fb0d3", 1.0: "#1f6fab"}
FLAT = 0.02  # change of the fraction per doubling of the length
MIN_ACTIONS = 25  # of a length bin


class Bin(Struct, frozen=True):
    lengths: tuple[int, int]  # shortest and longest in it
    mean_length: float
    actions: int
    out_of_range: float
    active: float


class Curve(Struct, frozen=True):
    """One alpha. Slopes are changes of the out-of-range fraction per doubling of the length."""

    alpha: float
    out_of_range: float
    active: float
    slope: float
    slope_stderr: float
    flat: str  # "yes", "no" or "undecided"
    bins: tuple[Bin, ...]


class Result(Struct, frozen=True):
    source: str
    actions: int
    doublings: float  # of the length, between its 5th and 95th percentile
    clip: tuple[float, float]
    flattest_alpha: float
    verdict: str
    curves: tuple[Curve, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", type=Path, help="a run's folder, or its run.sqlite")
    parser.add_argument("--update", type=int, nargs="+", default=(), help="default: the last one")
    parser.add_argument("--clip", type=float, help="default: 1e-3, and the run's own for a run")
    parser.add_argument("--actions", type=int, default=50_000, help="synthetic actions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/figures"))
    arguments = parser.parse_args()
    clip = arguments.clip or DEFAULT_CLIP
    drawn = [synthetic(h, arguments.actions, arguments.seed, clip) for h in (1.0, 0.9)]
    if arguments.run is not None:
        try:
            drawn.append(from_run(arguments.run, arguments.update, arguments.clip))
        except (ValueError, RunFileError) as error:
            parser.error(str(error))
    results = [measure(actions) for actions in drawn]
    for result in results:
        print(f"{result.source}: {result.verdict}")
    _plots.save(arguments.output, "clip_by_length", draw(drawn, results), results)


def measure(actions: Actions) -> Result:
    curves = tuple(_curve(actions, alpha) for alpha in ALPHAS)
    flattest = min(curves, key=lambda curve: abs(curve.slope))
    (half,) = [curve for curve in curves if curve.alpha == 0.5]
    flat = {"yes": "is flat", "no": "is not flat", "undecided": "may be flat"}[half.flat]
    if half.out_of_range == 0:
        flat = f"says nothing, since nothing is out of range at a clip of {actions.clip_high:g}"
    return Result(
        source=actions.source,
        actions=len(actions.length),
        doublings=actions.doublings,
        clip=(actions.clip_low, actions.clip_high),
        flattest_alpha=flattest.alpha,
        verdict=(
            f"{actions.reservation}alpha = 0.5 {flat}:"
            f" {half.slope:+.3f} ± {half.slope_stderr:.3f} out of range per"
            f" doubling of the length (0: {curves[0].slope:+.3f}, 1: {curves[-1].slope:+.3f});"
            f" the flattest of {len(curves)} is alpha = {flattest.alpha:g};"
            f" out of range {half.out_of_range:.3f}, active {half.active:.3f}"
        ),
        curves=curves,
    )


def slope_per_doubling(length: Floats, flag: Floats) -> tuple[float, float]:
    """Least-squares slope of `flag` on log2 length, and its heteroscedastic standard error.

    0 and infinity when all lengths are equal.
    """
    x = np.log2(length)
    x = x - x.mean()
    spread = float((x * x).sum())
    if spread == 0:
        return 0.0, float("inf")
    slope = float((x * flag).sum()) / spread
    residual = flag - flag.mean() - slope * x
    return slope, float(np.sqrt(((x * residual) ** 2).sum())) / spread


def _curve(actions: Actions, alpha: float) -> Curve:
    surrogate = clipped(
        torch.from_numpy(actions.log_ratio(alpha)),
        torch.from_numpy(actions.advantage),
        actions.clip_low,
        actions.clip_high,
    )
    out = surrogate.out_of_range.numpy().astype(np.float64)
    active = surrogate.active.numpy().astype(np.float64)
    slope, stderr = slope_per_doubling(actions.length.astype(np.float64), out)
    return Curve(
        alpha=alpha,
        out_of_range=float(out.mean()),
        active=float(active.mean()),
        slope=slope,
        slope_stderr=stderr,
        flat=_is_flat(slope, stderr),
        bins=tuple(
            Bin(
                lengths=(int(actions.length[mask].min()), int(actions.length[mask].max())),
                mean_length=float(actions.length[mask].mean()),
                actions=int(mask.sum()),
                out_of_range=float(out[mask].mean()),
                active=float(active[mask].mean()),
            )
            for mask in _plots.length_bins(actions.length, MIN_ACTIONS)
        ),
    )


def _is_flat(slope: float, stderr: float) -> str:
    if abs(slope) + 2 * stderr < FLAT:
        return "yes"
    return "no" if abs(slope) - 2 * stderr > FLAT else "undecided"


def draw(drawn: list[Actions], results: list[Result]) -> Figure:
    figure, axes = _plots.panels(len(results), 2)
    for (left, right), actions, result in zip(axes, drawn, results, strict=True):
        for axis, name in ((left, "out_of_range"), (right, "active")):
            for curve in result.curves:
                x = np.array([one.mean_length for one in curve.bins])
                y = np.array([getattr(one, name) for one in curve.bins])
                n = np.array([one.actions for one in curve.bins])
                error = np.sqrt(y * (1 - y) / n)
                colour = COLOURS[curve.alpha]
                axis.fill_between(x, y - error, y + error, color=colour, alpha=0.15, linewidth=0)
                width = 2.4 if curve.alpha == 0.5 else 1.5
                label = rf"$\alpha$ = {curve.alpha:g}" + (" (CAPO)" if curve.alpha == 0.5 else "")
                axis.plot(x, y, "o-", color=colour, markersize=3, linewidth=width, label=label)
            _plots.length_axis(axis, actions.length)
            axis.set_ylim(0, 1.02 if name == "out_of_range" else 0.62)
        left.set_ylabel("fraction of actions")
        left.set_title(f"{result.source}\nout of range: ratio beyond 1 ± {actions.clip_high:g}")
        right.set_title(f"{result.actions:,} actions\nactive: clipping removed the gradient")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(ALPHAS))
    return figure


if __name__ == "__main__":
    main()
