"""The curves and bars of the report, each a function of the run and a theme. Pictures of digits are in pictures.py."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import shardow

from .averages import RAW, name_of
from .measure import FOREACH, SHARDOW, SOURCES
from .theme import Run, Theme, over_steps


def frechet(run: Run, theme: Theme) -> Figure:
    """Of every set of weights over training, beside the scale that real digits give."""
    figure = Figure()
    axes = over_steps(figure.add_subplot(), run, theme, "Fréchet distance (log scale)")
    real = run["train"]["real"]
    axes.axhspan(real["least"], real["most"], color=theme.other, alpha=0.35, linewidth=0)
    for name in run["train"]["evaluations"][0].frechet:
        for part, inside in (("train", None), ("resume", theme.ground)):
            points = [(e.step, e.frechet[name]) for e in run[part]["evaluations"]]
            (line,) = axes.plot(
                *zip(*points, strict=True), "o-", color=theme.colour(name, run["options"]), ms=4, mfc=inside
            )
            line.set_label(name if part == "train" else "")
    axes.axhline(real["mean"], color=theme.faint, linewidth=1, label="real digits, drawn again")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.legend(loc="upper right", bbox_to_anchor=(0.9, 1.0))
    return figure


def _curves(run: Run, theme: Theme, y: str, curves: dict[str, list[tuple[float, float]]]) -> Figure:
    figure = Figure()
    axes = over_steps(figure.add_subplot(), run, theme, y)
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), color=theme.colour(name, run["options"]), label=name)
    axes.set_ylim(bottom=0)
    if len(curves) > 1:
        axes.legend(loc="lower left")
    return figure


def distance(run: Run, theme: Theme) -> Figure:
    evaluations = run["train"]["evaluations"] + run["resume"]["evaluations"][1:]
    curves = {name: [(e.step, 100 * e.apart[name]) for e in evaluations] for name in evaluations[0].apart}
    return _curves(run, theme, "|average − weights| / |weights|, %", curves)


def loss(run: Run, theme: Theme) -> Figure:
    return _curves(run, theme, "loss, squared error per pixel", {RAW: run["train"]["loss"] + run["resume"]["loss"]})


def decay(run: Run, theme: Theme) -> Figure:
    """The decay of every step, and the number of steps that it averages over, 1 / (1 - decay)."""
    figure = Figure()
    upper, lower = figure.subplots(2, 1, sharex=True)
    over_steps(upper, run, theme, "decay").set_xlabel("")
    over_steps(lower, run, theme, "window, steps", words=False)
    steps, *decays = zip(*run["train"]["decay"], *run["resume"]["decay"], strict=True)
    for values, target, colour in zip(decays, run["options"].decays, theme.averages, strict=False):
        upper.plot(steps, values, color=colour, label=name_of(target))
        lower.plot(steps, [1 / (1 - d) for d in values], color=colour)
    upper.set_ylim(min(0.95, *(1 - 2 * (1 - d) for d in run["options"].decays)), 1.0)
    lower.set_ylim(bottom=0)
    for axes in (upper, lower):
        axes.yaxis.set_major_locator(MaxNLocator(4))
    upper.legend(loc="lower right", bbox_to_anchor=(0.9, 0.0))
    figure.align_ylabels()
    return figure


def afterwards(run: Run, theme: Theme) -> Figure:
    """The distance over the width of averages that were made after training; of those that were tracked too, beside
    it."""
    found, figure = run["train"]["afterwards"], Figure()
    axes = figure.add_subplot(xlabel="width of the average, sigma_rel", ylabel="Fréchet distance (log scale)")
    made = sorted({**{one["sigma_rel"]: one["made"] for one in found["widths"]}, **found["more"]}.items())
    axes.axhline(run["train"]["evaluations"][-1].frechet[RAW], color=theme.raw, label="the weights themselves")
    axes.plot(*zip(*made, strict=True), "o-", color=theme.averages[0], ms=4, label="made from snapshots")
    tracked = [(one["sigma_rel"], one["tracked"]) for one in found["widths"]]
    axes.plot(
        *zip(*tracked, strict=True),
        "o",
        color=theme.averages[3],
        ms=11,
        mfc="none",
        mew=1.5,
        label="tracked in training",
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.legend(loc="best")
    return figure


def merges(run: Run, theme: Theme) -> Figure:
    """The distance of the last weights, of merges of checkpoints, and of the best average."""
    found, figure = run["train"]["afterwards"], Figure((7.2, 2.6))
    axes = figure.add_subplot(xlabel="Fréchet distance")
    best = min(found["widths"], key=lambda one: one["tracked"])
    rows = {"the last weights": (run["train"]["evaluations"][-1].frechet[RAW], theme.raw)}
    rows |= {f"merged: {name}": (value, theme.averages[0]) for name, value in found["merges"].items()}
    rows[f"tracked average, sigma_rel {best['sigma_rel']:g}"] = (best["tracked"], theme.other)
    bars = axes.barh(
        range(len(rows)),
        [value for value, _ in rows.values()],
        color=[colour for _, colour in rows.values()],
        height=0.6,
    )
    axes.bar_label(bars, [f"{value:.3f}" for value, _ in rows.values()], fontsize=9, padding=3)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlim(0, 1.15 * max(value for value, _ in rows.values()))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure


def memory(run: Run, theme: Theme) -> Figure:
    """A bar for each rank, of the training and of the resume, before a bar for a full copy."""
    full, figure = run["train"]["costs"]["full_copy"] / 1e6, Figure()
    axes = figure.add_subplot(
        xlabel="rank, of the training and of the resume", ylabel="memory of the averages, MB", ylim=(0, 1.25 * full)
    )
    parts = (run["train"]["costs"]["bytes"], run["resume"]["bytes"])
    labels, held = zip(
        *((f"{rank} of {len(part)}", count / 1e6) for part in parts for rank, count in enumerate(part)), strict=True
    )
    places = [place + 0.6 * (place >= len(parts[0])) for place in range(len(held))]
    axes.bar(places, full, width=0.72, color=theme.other, alpha=0.55, label="a full copy on every rank")
    bars = axes.bar(places, held, width=0.72, color=theme.averages[0], label="Shardow: what the rank holds")
    axes.bar_label(bars, [f"{amount:.2f}" for amount in held], fontsize=9, padding=2)
    axes.set_xticks(places, labels)
    axes.legend(loc="upper left", ncols=2, columnspacing=1.2, handlelength=1.2)
    return figure


def start(run: Run, theme: Theme) -> Figure:
    """The memory of every rank while a larger model gets its weights, both ways."""
    colours = shardow.memory.Colours(theme.ground, theme.ink, theme.faint, theme.grid, theme.raw, theme.averages[0])
    timelines = {name: shardow.memory.Timeline(ranks) for name, ranks in run["starts"]["timelines"].items()}
    return shardow.memory.figure(timelines, colours)


def update_time(run: Run, theme: Theme) -> Figure:
    seconds = run["train"]["costs"]["seconds"]
    figure = Figure()
    axes = figure.add_subplot(xlabel="one update of all averages, ms (bar: median, line: quartiles)")
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x")
    for place, name in enumerate((SOURCES, FOREACH, SHARDOW)):
        low, middle, high = (1e3 * s for s in seconds[name])
        axes.barh(place, middle, height=0.6, color=theme.averages[0] if name == SHARDOW else theme.other)
        axes.plot([low, high], [place, place], color=theme.ink, linewidth=1.5, solid_capstyle="butt")
        axes.annotate(
            f"{middle:.3f}",
            (max(middle, high), place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_yticks(range(3), ["mul_().add_()\nper tensor", "torch\nforeach lerp", "Shardow"])
    axes.set_xlim(0, 1.18e3 * max(high for *_, high in seconds.values()))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    return figure
