"""Every picture of the report, on light and on dark ground. Each function takes the run and a theme; all_figures() names them."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .evaluate import RAW, name_of
from .measure import FOREACH, SHARDOW, SOURCES
from .options import Options


@dataclass(frozen=True)
class Theme:
    name: str
    ground: str
    ink: str
    faint: str  # axes, ticks
    grid: str
    other: str  # what is compared with
    raw: str
    averages: tuple[str, ...]
    pixels: str  # colour map of digits

    def colour(self, name: str, options: Options) -> str:
        return self.raw if name == RAW else self.averages[[name_of(d) for d in options.decays].index(name)]


LIGHT = Theme(
    "light", "#ffffff", "#1d2433", "#5b6475", "#e6e9ef", "#b4bac6", "#d9692b", ("#2c6fbb", "#17917a", "#7a4fb5", "#b03a6f"), "gray_r"
)
DARK = Theme("dark", "#161b26", "#e7ebf3", "#a3adbf", "#2a3242", "#5e687b", "#f08a4b", ("#6aa8f0", "#43c4a8", "#b493ea", "#e37fae"), "gray")

Run = dict[str, Any]


def png(figure: Figure, theme: Theme) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200, facecolor=theme.ground, metadata={"Software": None})
    return buffer.getvalue()


def _figure(theme: Theme, width: float = 5.6, height: float = 3.5) -> Figure:
    matplotlib.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10, "axes.titlesize": 10, "mathtext.default": "regular"})
    return Figure(figsize=(width, height), layout="constrained", facecolor=theme.ground)


def _dress(axes: Axes, theme: Theme, x: str, y: str, grid: str = "y") -> Axes:
    axes.set_facecolor(theme.ground)
    axes.set_xlabel(x, color=theme.faint)
    axes.set_ylabel(y, color=theme.faint)
    axes.tick_params(colors=theme.faint, length=0)
    axes.grid(axis=grid, color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.other)
    return axes


def _legend(axes: Axes, theme: Theme, **where: Any) -> None:
    legend = axes.legend(frameon=False, fontsize=9, **where)
    for text in legend.get_texts():
        text.set_color(theme.ink)


def _mark_resume(axes: Axes, run: Run, theme: Theme) -> None:
    """Where other processes, at another world size, went on."""
    options: Options = run["options"]
    axes.axvline(options.steps, color=theme.faint, linewidth=1, linestyle=(0, (2, 2)))
    axes.annotate(
        f"resumed, {options.ranks} \u2192 {options.resume_ranks} ranks", (options.steps, 0.99), xycoords=("data", "axes fraction"), xytext=(-4, 0),
        textcoords="offset points", rotation=90, ha="right", va="top", fontsize=8, color=theme.faint,
    )  # fmt: skip


def frechet(run: Run, theme: Theme) -> Figure:
    options: Options = run["options"]
    figure = _figure(theme)
    axes = _dress(figure.add_subplot(), theme, "optimizer step", "Fr\u00e9chet distance (log scale)")
    evaluations = run["train"]["evaluations"]
    later = run["resume"]["evaluations"]
    for name in evaluations[0].frechet:
        colour = theme.colour(name, options)
        axes.plot(
            [e.step for e in evaluations],
            [e.frechet[name] for e in evaluations],
            color=colour,
            marker="o",
            markersize=4,
            linewidth=2,
            label=name,
        )
        axes.plot(
            [e.step for e in later],
            [e.frechet[name] for e in later],
            color=colour,
            marker="o",
            markersize=4,
            markerfacecolor=theme.ground,
            linewidth=2,
        )
    real = run["train"]["real"]
    axes.axhspan(real["least"], real["most"], color=theme.other, alpha=0.35, linewidth=0)
    axes.axhline(real["mean"], color=theme.faint, linewidth=1, label="real digits, drawn again")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    _mark_resume(axes, run, theme)
    _legend(axes, theme, loc="upper right", bbox_to_anchor=(0.9, 1.0))
    return figure


def _over_steps(run: Run, theme: Theme, y: str, curves: dict[str, list[tuple[float, float]]]) -> Figure:
    figure = _figure(theme)
    axes = _dress(figure.add_subplot(), theme, "optimizer step", y)
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), color=theme.colour(name, run["options"]), linewidth=2, label=name)
    axes.set_ylim(bottom=0)
    _mark_resume(axes, run, theme)
    return figure


def distance(run: Run, theme: Theme) -> Figure:
    evaluations = run["train"]["evaluations"] + run["resume"]["evaluations"][1:]
    curves = {name: [(e.step, 100 * e.apart[name]) for e in evaluations] for name in evaluations[0].apart}
    figure = _over_steps(run, theme, "|average \u2212 weights| / |weights|, %", curves)
    _legend(figure.axes[0], theme, loc="lower left")
    return figure


def loss(run: Run, theme: Theme) -> Figure:
    points = run["train"]["loss"] + run["resume"]["loss"]
    return _over_steps(run, theme, "loss (mean squared error per pixel)", {RAW: points})


def decay(run: Run, theme: Theme) -> Figure:
    """The decay used at each step, and the number of steps that it averages over, 1 / (1 - decay)."""
    options: Options = run["options"]
    rows = run["train"]["decay"] + run["resume"]["decay"]
    figure = _figure(theme, height=4.2)
    upper, lower = figure.subplots(2, 1, sharex=True)
    _dress(upper, theme, "", "decay")
    _dress(lower, theme, "optimizer step", "window, steps")
    for k, target in enumerate(options.decays):
        steps, decays = [row[0] for row in rows], [row[1 + k] for row in rows]
        colour = theme.averages[k]
        upper.plot(steps, decays, color=colour, linewidth=2, label=name_of(target))
        lower.plot(steps, [1 / (1 - d) for d in decays], color=colour, linewidth=2)
    upper.set_ylim(min(0.9, *options.decays) - 0.01, 1.001)
    lower.set_ylim(bottom=0)
    for axes in (upper, lower):
        axes.axvline(options.steps, color=theme.faint, linewidth=1, linestyle=(0, (2, 2)))
        axes.yaxis.set_major_locator(MaxNLocator(5))
    _legend(upper, theme, loc="lower right", bbox_to_anchor=(0.93, 0.0))
    figure.align_ylabels()
    return figure


def memory(run: Run, theme: Theme) -> Figure:
    options, costs = run["options"], run["train"]["costs"]
    figure = _figure(theme, height=3.3)
    axes = _dress(figure.add_subplot(), theme, "", "memory of the averages, MB")
    held = [*costs["bytes"], *run["resume"]["bytes"]]
    names = [f"rank {r}" for r in range(len(costs["bytes"]))] + [f"rank {r} " for r in range(len(run["resume"]["bytes"]))]
    places = [i + (0.6 if i >= len(costs["bytes"]) else 0) for i in range(len(held))]
    axes.bar(places, [costs["full_copy"] / 1e6] * len(held), width=0.72, color=theme.other, alpha=0.55, label="a full copy on every rank")
    bars = axes.bar(places, [b / 1e6 for b in held], width=0.72, color=theme.averages[0], label="Shardow: what the rank holds")
    axes.bar_label(bars, [f"{b / 1e6:.2f}" for b in held], color=theme.ink, fontsize=9, padding=2)
    axes.set_xticks(places, names)
    first, second = len(costs["bytes"]), len(run["resume"]["bytes"])
    for at, count in ((sum(places[:first]) / first, options.ranks), (sum(places[first:]) / second, options.resume_ranks)):
        text = f"{'trained' if count is options.ranks and at == sum(places[:first]) / first else 'resumed'} on {count}"
        axes.annotate(
            text,
            (at, 0),
            xycoords=("data", "axes fraction"),
            xytext=(0, -24),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=9,
            color=theme.faint,
        )
    axes.set_xlabel(" \n", fontsize=8)
    axes.set_ylim(0, costs["full_copy"] / 1e6 * 1.32)
    _legend(axes, theme, loc="upper left", ncols=2, columnspacing=1.2, handlelength=1.2)
    return figure


def update_time(run: Run, theme: Theme) -> Figure:
    seconds = run["train"]["costs"]["seconds"]
    figure = _figure(theme, height=2.5)
    axes = _dress(figure.add_subplot(), theme, "time of one update of all averages, ms (median; line: quartiles)", "", grid="x")
    for place, name in enumerate((SOURCES, FOREACH, SHARDOW)):
        low, middle, high = (1e3 * s for s in seconds[name])
        colour = theme.averages[0] if name == SHARDOW else theme.other
        axes.barh(place, middle, height=0.62, color=colour)
        axes.plot([low, high], [place, place], color=theme.ink, linewidth=1.5, solid_capstyle="butt")
        axes.annotate(
            f"{middle:.3f}", (max(middle, high), place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9, color=theme.ink
        )
    axes.set_yticks(range(3), ["mul_().add_()\nper tensor", "torch foreach\nlerp", "Shardow"])
    axes.set_xlim(0, 1.18e3 * max(high for *_, high in seconds.values()))
    return figure


def _tile(images: torch.Tensor, columns: int) -> torch.Tensor:
    """(n, 1, 8, 8) to one picture with a thin gap around every image."""
    rows = len(images) // columns
    framed = torch.nn.functional.pad(images[: rows * columns, 0], (1, 1, 1, 1), value=-1.0)
    return framed.unflatten(0, (rows, columns)).permute(0, 2, 1, 3).flatten(2).flatten(0, 1)


def _show(axes: Axes, picture: torch.Tensor, theme: Theme) -> None:
    axes.imshow(picture, cmap=theme.pixels, vmin=-1, vmax=1, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(theme.grid)


def sample_sets(run: Run) -> dict[str, torch.Tensor]:
    """{what: (n, 1, 8, 8)}, a digit per column: real ones, then those of each set of weights, from the same noise."""
    return {"real digits": run["real_images"], **run["train"]["evaluations"][-1].images}


def samples(run: Run, theme: Theme, which: str) -> Figure:
    figure = _figure(theme, 4.2, 2.62)
    _show(figure.add_subplot(), _tile(sample_sets(run)[which], 10), theme)
    return figure


def samples_side_by_side(run: Run, theme: Theme) -> Figure:
    sets = sample_sets(run)
    columns = 2
    rows = -(-len(sets) // columns)
    figure = _figure(theme, 8.6, 2.95 * rows)
    for axes, (name, images) in zip(figure.subplots(rows, columns).flat, sets.items(), strict=False):
        _show(axes, _tile(images, 10), theme)
        axes.set_title(name, color=theme.ink)
    for axes in figure.axes[len(sets) :]:
        axes.remove()
    return figure


def growth(run: Run, theme: Theme) -> Figure:
    """The same noise at every evaluation: a row for each set of weights, a column for each evaluation."""
    evaluations = run["train"]["evaluations"]
    chosen = [
        evaluations[round(i * (len(evaluations) - 1) / max(1, min(8, len(evaluations)) - 1))] for i in range(min(8, len(evaluations)))
    ]
    names = list(evaluations[0].images)
    figure = _figure(theme, 0.9 * len(chosen) + 1.4, 0.95 * len(names) * 2 + 0.4)
    grid = figure.subplots(len(names), len(chosen), squeeze=False)
    for row, name in zip(grid, names, strict=True):
        for axes, evaluation in zip(row, chosen, strict=True):
            _show(axes, _tile(evaluation.images[name][[3, 8]], 1), theme)
            if axes in grid[0]:
                axes.set_title(f"{evaluation.step}", color=theme.faint, fontsize=9)
        row[0].set_ylabel(name, color=theme.colour(name, run["options"]))
    figure.supxlabel("optimizer step", color=theme.faint, fontsize=10, y=1.0, va="top")
    return figure


def all_figures(run: Run) -> dict[str, Callable[[Run, Theme], Figure]]:
    """{file name without .png: what draws it}."""
    grids = {f"samples_{name.replace(' ', '_')}": partial(samples, which=name) for name in sample_sets(run)}
    fixed = (samples_side_by_side, growth, frechet, loss, distance, decay, memory, update_time)
    return {**grids, **{draw.__name__: draw for draw in fixed}}
