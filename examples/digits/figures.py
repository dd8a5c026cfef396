"""The curves and bars of the report, each a function of the run and a theme. Pictures of digits are in pictures.py."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import shardow

from .averages import RAW, name_of
from .measure import FOREACH, SHARDOW, SOURCES
from .options import Options
from .theme import Theme, dress, legend, mark_resume, new_figure

Run = dict[str, Any]  # what __main__ gathers: options, command, machine, seconds, train, resume, real_images


def frechet(run: Run, theme: Theme) -> Figure:
    """Of every set of weights over training, beside the scale that real digits give."""
    options: Options = run["options"]
    figure = new_figure(theme)
    axes = dress(figure.add_subplot(), theme, "optimizer step", "Fréchet distance (log scale)")
    real = run["train"]["real"]
    axes.axhspan(real["least"], real["most"], color=theme.other, alpha=0.35, linewidth=0)
    for name in run["train"]["evaluations"][0].frechet:
        for part, inside in (("train", None), ("resume", theme.ground)):
            points = [(e.step, e.frechet[name]) for e in run[part]["evaluations"]]
            line = {"color": theme.colour(name, options), "marker": "o", "markersize": 4, "linewidth": 2, "markerfacecolor": inside}
            axes.plot(*zip(*points, strict=True), label=name if part == "train" else None, **line)
    axes.axhline(real["mean"], color=theme.faint, linewidth=1, label="real digits, drawn again")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    mark_resume(axes, options, theme)
    legend(axes, theme, loc="upper right", bbox_to_anchor=(0.9, 1.0))
    return figure


def _over_steps(run: Run, theme: Theme, y: str, curves: dict[str, list[tuple[float, float]]]) -> Figure:
    figure = new_figure(theme)
    axes = dress(figure.add_subplot(), theme, "optimizer step", y)
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), color=theme.colour(name, run["options"]), linewidth=2, label=name)
    axes.set_ylim(bottom=0)
    mark_resume(axes, run["options"], theme)
    return figure


def distance(run: Run, theme: Theme) -> Figure:
    evaluations = run["train"]["evaluations"] + run["resume"]["evaluations"][1:]
    curves = {name: [(e.step, 100 * e.apart[name]) for e in evaluations] for name in evaluations[0].apart}
    figure = _over_steps(run, theme, "|average − weights| / |weights|, %", curves)
    legend(figure.axes[0], theme, loc="lower left")
    return figure


def loss(run: Run, theme: Theme) -> Figure:
    return _over_steps(run, theme, "loss, squared error per pixel", {RAW: run["train"]["loss"] + run["resume"]["loss"]})


def decay(run: Run, theme: Theme) -> Figure:
    """The decay of every step, and the number of steps that it averages over, 1 / (1 - decay)."""
    options: Options = run["options"]
    rows = run["train"]["decay"] + run["resume"]["decay"]
    figure = new_figure(theme)
    upper, lower = figure.subplots(2, 1, sharex=True)
    dress(upper, theme, "", "decay")
    dress(lower, theme, "optimizer step", "window, steps")
    steps = [row[0] for row in rows]
    for k, target in enumerate(options.decays):
        decays = [row[1 + k] for row in rows]
        upper.plot(steps, decays, color=theme.averages[k], linewidth=2, label=name_of(target))
        lower.plot(steps, [1 / (1 - d) for d in decays], color=theme.averages[k], linewidth=2)
    upper.set_ylim(min(0.95, *(1 - 2 * (1 - d) for d in options.decays)), 1.0)
    lower.set_ylim(bottom=0)
    for axes in (upper, lower):
        axes.yaxis.set_major_locator(MaxNLocator(4))
        mark_resume(axes, options, theme, words=axes is upper)
    legend(upper, theme, loc="lower right", bbox_to_anchor=(0.9, 0.0))
    figure.align_ylabels()
    return figure


def memory(run: Run, theme: Theme) -> Figure:
    """A bar for each rank, of the training and of the resume, before a bar for a full copy."""
    full = run["train"]["costs"]["full_copy"] / 1e6
    figure = new_figure(theme)
    axes = dress(figure.add_subplot(), theme, "", "memory of the averages, MB")
    labels, at = ("a full copy on every rank", "Shardow: what the rank holds"), 0.0
    ticks: list[tuple[float, str]] = []
    for word, held in (("trained on", run["train"]["costs"]["bytes"]), ("resumed on", run["resume"]["bytes"])):
        places = [at + r for r in range(len(held))]
        axes.bar(places, full, width=0.72, color=theme.other, alpha=0.55, label=labels[0] if at == 0 else None)
        bars = axes.bar(places, [b / 1e6 for b in held], width=0.72, color=theme.averages[0], label=labels[1] if at == 0 else None)
        axes.bar_label(bars, [f"{b / 1e6:.2f}" for b in held], color=theme.ink, fontsize=9, padding=2)
        ticks += [(place, f"{rank}") for rank, place in enumerate(places)]
        ticks.append((sum(places) / len(places) + 1e-6, f"\nrank, {word} {len(held)}"))
        at += len(held) + 0.6
    axes.set_xticks(*zip(*ticks, strict=True))
    axes.set_ylim(0, 1.25 * full)
    legend(axes, theme, loc="upper left", ncols=2, columnspacing=1.2, handlelength=1.2)
    return figure


def start(run: Run, theme: Theme) -> Figure:
    """The memory of every rank while a larger model gets its weights, both ways."""
    colours = shardow.memory.Colours(theme.ground, theme.ink, theme.faint, theme.grid, theme.raw, theme.averages[0])
    timelines = {name: shardow.memory.Timeline(ranks) for name, ranks in run["starts"]["timelines"].items()}
    return shardow.memory.figure(timelines, colours)


def update_time(run: Run, theme: Theme) -> Figure:
    seconds = run["train"]["costs"]["seconds"]
    figure = new_figure(theme)
    axes = dress(figure.add_subplot(), theme, "one update of all averages, ms (bar: median, line: quartiles)", "", grid="x")
    for place, name in enumerate((SOURCES, FOREACH, SHARDOW)):
        low, middle, high = (1e3 * s for s in seconds[name])
        axes.barh(place, middle, height=0.6, color=theme.averages[0] if name == SHARDOW else theme.other)
        axes.plot([low, high], [place, place], color=theme.ink, linewidth=1.5, solid_capstyle="butt")
        note: dict[str, Any] = {"va": "center", "fontsize": 9, "color": theme.ink}
        axes.annotate(f"{middle:.3f}", (max(middle, high), place), xytext=(5, 0), textcoords="offset points", **note)
    axes.set_yticks(range(3), ["mul_().add_()\nper tensor", "torch\nforeach lerp", "Shardow"])
    axes.set_xlim(0, 1.18e3 * max(high for *_, high in seconds.values()))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    return figure
