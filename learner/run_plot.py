"""The curves of a run as a picture. Needs matplotlib, draws without a display."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from capo.learner.report import CURVES
from capo.learner.run_reader import RunReader
from capo.protocol.errors import RunFileError


def plot_run(run_dir: Path, path: Path) -> None:
    """One panel per curve that the run recorded, over its updates, written as a PNG to `path`.

    Raises RunFileError if there is nothing to plot or nowhere to write to.
    """
    if path.suffix != ".png" or not path.parent.is_dir():
        raise RunFileError(f"{path} cannot be the plot: name a .png file in an existing folder.")
    with RunReader(run_dir) as reader:
        updates = [update for update in reader.updates() if update.status == "done"]
        config = reader.config()
        held_out = [(row.version, row.results) for row in reader.evaluations() if row.finished_at]
    if not updates:
        raise RunFileError(f"{run_dir} has no finished update yet, so there is nothing to plot.")
    curves = {
        label: [update.metrics.get(metric, np.nan) for update in updates]
        for label, metric in CURVES.items()
        if any(metric in update.metrics for update in updates)
    }
    figure = Figure(figsize=(11, 2.4 * ((len(curves) + 1) // 2)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots((len(curves) + 1) // 2, 2, squeeze=False).ravel()
    versions = [update.version + 1 for update in updates]
    for panel, (label, values) in zip(panels, curves.items(), strict=False):
        panel.plot(versions, values, linewidth=1)
        panel.set_title(label)
        panel.set_xlabel("update")
        if label == "success":
            panel.set_ylim(0, 1)
            for mode, mark in (("sampled", "o"), ("greedy", "s")):
                points = [(at, found[mode].success) for at, found in held_out if mode in found]
                if points:
                    panel.plot(*zip(*points, strict=True), mark, label=f"held out, {mode}")
            if held_out:
                panel.legend(loc="lower right")
    for panel in panels[len(curves) :]:
        panel.set_axis_off()
    figure.suptitle(f"{config.name}, seed {config.seed}, {config.algorithm.preset}")
    figure.savefig(path, format="png", dpi=120)
