"""The look of every picture: two themes, and what all axes have in common."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from .averages import RAW, name_of
from .options import Options

FONT = {"font.family": "DejaVu Sans", "font.size": 10, "axes.titlesize": 10}


@dataclass(frozen=True)
class Theme:
    """Colours; ``averages`` by the place of their decay."""

    name: str
    ground: str
    ink: str
    faint: str
    grid: str
    other: str  # what is compared with
    raw: str
    averages: tuple[str, ...]
    pixels: str  # colour map of digits: ink on paper, or chalk on a board

    def colour(self, name: str, options: Options) -> str:
        return self.raw if name == RAW else self.averages[[name_of(decay) for decay in options.decays].index(name)]


_ON_LIGHT, _ON_DARK = ("#2c6fbb", "#17917a", "#7a4fb5", "#b03a6f"), ("#6aa8f0", "#43c4a8", "#b493ea", "#e37fae")
LIGHT = Theme("light", "#ffffff", "#1d2433", "#5b6475", "#e6e9ef", "#b4bac6", "#d9692b", _ON_LIGHT, "gray_r")
DARK = Theme("dark", "#161b26", "#e7ebf3", "#a3adbf", "#2a3242", "#5e687b", "#f08a4b", _ON_DARK, "gray")


def new_figure(theme: Theme, width: float = 5.6, height: float = 3.5, pad: float = 0.08) -> Figure:
    """Inches; a little air on all sides."""
    layout = ConstrainedLayoutEngine(w_pad=pad, h_pad=pad, wspace=0.02, hspace=0.02)
    return Figure(figsize=(width, height), layout=layout, facecolor=theme.ground)


def png(figure: Figure, theme: Theme) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200, facecolor=theme.ground, metadata={"Software": None})
    return buffer.getvalue()


def dress(axes: Axes, theme: Theme, x: str, y: str, grid: str = "y") -> Axes:
    axes.set_facecolor(theme.ground)
    axes.set_xlabel(x, color=theme.faint)
    axes.set_ylabel(y, color=theme.faint)
    axes.tick_params(which="both", colors=theme.faint, length=0)
    axes.grid(axis=grid, color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.other)
    return axes


def legend(axes: Axes, theme: Theme, **where: Any) -> None:
    """On the ground of the figure, so that no line runs through its words."""
    made = axes.legend(frameon=True, facecolor=theme.ground, edgecolor="none", framealpha=0.85, fontsize=9, **where)
    for text in made.get_texts():
        text.set_color(theme.ink)


def mark_resume(axes: Axes, options: Options, theme: Theme, words: bool = True) -> None:
    """Where other processes, at another world size, went on."""
    axes.axvline(options.steps, color=theme.faint, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    if words:
        note = f"resumed, {options.ranks} → {options.resume_ranks} ranks"
        style: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": 8.5, "color": theme.faint}
        axes.annotate(note, (options.steps, 1.0), xycoords=("data", "axes fraction"), xytext=(4, 2), textcoords="offset points", **style)
