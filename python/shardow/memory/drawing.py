"""Pictures of memory timelines, with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardow.memory.samples import Samples, Series, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 3.6, 2.9  # inches of a panel
_GROUND, _INK, _FAINT, _GRID = "#ffffff", "#1d2433", "#5b6475", "#e6e9ef"
_FIRST, _OTHERS = "#d9692b", "#2c6fbb"  # rank 0, which often holds more, and all the rest
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def draw(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Timelines side by side, by their titles, with one scale. Each rank's resident memory above what it had at the
    start, and its device's memory where there is one. Needs matplotlib; the suffix of ``path`` is the format."""
    figure(timelines).savefig(path, dpi=160, facecolor=_GROUND)


def figure(timelines: Mapping[str, Timeline]) -> Figure:
    """The matplotlib figure that draw() writes, for reports. One column for each title; rows are memory of the host
    above what was there at the start and, where there is any, of the device."""
    from matplotlib.figure import Figure

    columns = {title: one.ranks for title, one in timelines.items()}
    rows: list[tuple[str, Callable[[Samples], Series]]] = [
        ("host memory above the start", lambda one: [(at, amount - one.before) for at, amount in one.resident])
    ]
    if any(one.device for ranks in columns.values() for one in ranks):
        rows.append(("device memory", lambda one: one.device))
    drawn = Figure(figsize=(_WIDTH * len(columns), _HEIGHT * len(rows)), layout="constrained", facecolor=_GROUND)
    axes = drawn.subplots(len(rows), len(columns), sharex="row", sharey="row", squeeze=False)
    for row, (what, series_of) in enumerate(rows):
        most = max((amount for ranks in columns.values() for one in ranks for _, amount in series_of(one)), default=1)
        scale, unit = next(((scale, unit) for scale, unit in _UNITS if most >= scale), (1, "bytes"))
        for column, (title, ranks) in enumerate(columns.items()):
            panel = axes[row][column]
            _dress(panel, f"{what}, {unit}" if column == 0 else "")
            _lines(panel, ranks, series_of, scale)
            panel.set_ylim(0, most / scale * 1.06)
            if row == 0:
                highest = max(one.peak - one.before for one in ranks)
                said = f"at most {highest / scale:.{2 if scale == 2**30 else 0}f} {unit}"
                panel.set_title(f"{title}\n{said}", color=_INK, fontsize=10, loc="left")
    handles, labels = axes[0][0].get_legend_handles_labels()
    drawn.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=9, labelcolor=_INK)
    return drawn


def _lines(panel: Axes, ranks: Sequence[Samples], series_of: Any, scale: int) -> None:
    start = min(one.resident[0][0] for one in ranks)
    for one in sorted(ranks, key=lambda one: -one.rank):  # rank 0 on top
        label = None
        if len(ranks) > 1:
            label = {0: "rank 0", len(ranks) - 1: "other ranks" if len(ranks) > 2 else "rank 1"}.get(one.rank)
        points = series_of(one)
        panel.plot(
            [at - start for at, _ in points],
            [amount / scale for _, amount in points],
            color=_OTHERS if one.rank else _FIRST,
            linewidth=1.8 if one.rank == 0 else 1.4,
            label=label,
        )
    for at, what in ranks[0].marks:
        panel.axvline(at - start, color=_FAINT, linewidth=0.8, linestyle=(0, (2, 2)))
        panel.annotate(
            what, (at - start, 1.0), xycoords=("data", "axes fraction"), xytext=(-3, -4), textcoords="offset points",
            rotation=90, ha="right", va="top", fontsize=8, color=_FAINT,
        )  # fmt: skip


def _dress(panel: Axes, y: str) -> None:
    panel.set_facecolor(_GROUND)
    panel.set_xlabel("seconds", color=_FAINT)
    panel.set_ylabel(y, color=_FAINT)
    panel.tick_params(which="both", colors=_FAINT, length=0)
    panel.grid(axis="y", color=_GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    for side, spine in panel.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_FAINT)
