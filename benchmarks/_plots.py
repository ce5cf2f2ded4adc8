"""One look for all figures, and where they and their numbers go."""

from pathlib import Path
from typing import Any

import matplotlib
import msgspec
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, GRID = "#222222", "#6b6b6b", "#e4e4e4"
_STYLE = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
}
matplotlib.rcParams.update(_STYLE)
HALF_OCTAVES = np.array(sorted({1, 2, 3} | {k << e for e in range(24) for k in (4, 6)}))


def panels(
    rows: int, columns: int, *, width: float = 4.6, height: float = 3.1
) -> tuple[Figure, Any]:
    """A figure and its axes as an array [rows, columns]."""
    size = (width * columns, height * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    return figure, axes


def length_axis(axes: Axes, lengths: NDArray[np.int64]) -> None:
    """Logarithmic, ticks at powers of two."""
    axes.set_xscale("log", base=2)
    low, high = int(np.log2(lengths.min())), int(np.ceil(np.log2(lengths.max())))
    exponents = range(low, high + 1, 1 if high - low <= 8 else 2)
    axes.set_xticks([2.0**e for e in exponents], [str(2**e) for e in exponents])
    axes.minorticks_off()
    axes.set_xlabel("action length (tokens)")


def length_bins(lengths: NDArray[np.int64], at_least: int) -> list[NDArray[np.bool_]]:
    """Half-octave bins (1, 2, 3, 4-5, 6-7, 8-11, ...) that hold enough actions, as masks."""
    bins = np.searchsorted(HALF_OCTAVES, lengths, side="right")
    masks = [bins == one for one in np.unique(bins)]
    return [mask for mask in masks if mask.sum() >= at_least]


def save(folder: Path, name: str, figure: Figure, numbers: object) -> None:
    """FOLDER/NAME.png and FOLDER/NAME.json."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png")
    pyplot.close(figure)
    encoded = msgspec.json.format(msgspec.json.encode(numbers), indent=2)
    (folder / f"{name}.json").write_bytes(encoded + b"\n")
    print(f"written: {folder / name}.png and .json")
