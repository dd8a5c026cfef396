"""Pictures of digits: real ones, and samples of the weights and of each average."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import figures
from .theme import Run, Theme

COLUMNS = 10  # one for each class
SHOWN = (3, 8)  # digits that are followed over training
MOST = 8  # evaluations that are drawn


def sample_sets(run: Run) -> dict[str, torch.Tensor]:
    """{what: (n, 1, 8, 8)}: real digits, then the samples of each set of weights from the same noise."""
    return {"real digits": run["real_images"], **run["train"]["evaluations"][-1].images}


def show(axes: Axes, images: torch.Tensor, columns: int, theme: Theme) -> None:
    """(n, 1, 8, 8) as one picture, row by row, with a gap around every image."""
    rows = len(images) // columns
    framed = torch.nn.functional.pad(images[: rows * columns, 0], (1, 1, 1, 1), value=-1.0)
    picture = framed.unflatten(0, (rows, columns)).permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    axes.imshow(picture, cmap=theme.pixels, vmin=-1, vmax=1, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color=theme.grid)


def samples(run: Run, theme: Theme, which: str) -> Figure:
    figure = Figure((5.0, 3.07))
    show(figure.add_subplot(), sample_sets(run)[which], COLUMNS, theme)
    return figure


def samples_side_by_side(run: Run, theme: Theme) -> Figure:
    sets = sample_sets(run)
    rows = -(-len(sets) // 2)
    figure = Figure((9.0, 3.1 * rows))
    for place, (name, images) in enumerate(sets.items(), 1):
        show(figure.add_subplot(rows, 2, place, title=name), images, COLUMNS, theme)
    return figure


def growth(run: Run, theme: Theme) -> Figure:
    """The same noise over training: a row for each set of weights, a column for each evaluation."""
    evaluations = run["train"]["evaluations"]
    count = min(MOST, len(evaluations))
    chosen = [evaluations[round((i + 1) * len(evaluations) / count) - 1] for i in range(count)]
    names = list(evaluations[0].images)
    figure = Figure((1.0 * count + 0.6, 1.98 * len(names) + 0.3))
    figure.set_layout_engine("constrained", w_pad=0.03, h_pad=0.03)
    grid = figure.subplots(len(names), count, squeeze=False)
    for row, name in zip(grid, names, strict=True):
        for axes, evaluation in zip(row, chosen, strict=True):
            show(axes, evaluation.images[name][list(SHOWN)], 1, theme)
        row[0].set_ylabel(name, color=theme.colour(name, run["options"]))
    for axes, evaluation in zip(grid[0], chosen, strict=True):
        axes.set_title(f"step {evaluation.step:,}", color=theme.faint, fontsize=9)
    return figure


def all_figures(run: Run) -> dict[str, Callable[[Run, Theme], Figure]]:
    """{file name without .png: what draws it}, curves and bars included."""
    grids = {f"samples_{name.replace(' ', '_')}": partial(samples, which=name) for name in sample_sets(run)}
    of_averages = (
        (figures.distance, figures.decay, figures.memory, figures.update_time, figures.afterwards, figures.merges)
        if run["options"].use_ema
        else ()
    )
    curves = (figures.frechet, figures.loss, *of_averages, figures.start)
    return {**grids, **{draw.__name__: draw for draw in (samples_side_by_side, growth, *curves)}}
