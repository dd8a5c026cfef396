"""The look of every picture: two themes, as settings of matplotlib, and what all curves have in common."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .averages import RAW, name_of
from .options import Options

Run = dict[str, Any]  # what __main__ gathers: options, command, machine, seconds, train, resume, real_images, starts


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

    def settings(self) -> dict[str, Any]:
        return {
            "figure.figsize": (5.6, 3.5), "figure.constrained_layout.use": True, "figure.facecolor": self.ground,
            "savefig.dpi": 200,
            "figure.constrained_layout.w_pad": 0.08, "figure.constrained_layout.h_pad": 0.08,
            "font.family": "DejaVu Sans",
            "axes.facecolor": self.ground, "axes.edgecolor": self.other, "axes.labelcolor": self.faint,
            "axes.titlesize": 10,
            "axes.titlecolor": self.ink, "axes.grid": True, "axes.grid.axis": "y", "grid.color": self.grid,
            "axes.axisbelow": True,
            "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False, "text.color": self.ink,
            "xtick.color": self.faint, "ytick.color": self.faint, "legend.edgecolor": "none", "legend.fontsize": 9,
            "lines.linewidth": 2,
            **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
        }  # fmt: skip


LIGHT = Theme(
    "light",
    "#ffffff",
    "#1d2433",
    "#5b6475",
    "#e6e9ef",
    "#b4bac6",
    "#d9692b",
    ("#2c6fbb", "#17917a", "#7a4fb5", "#b03a6f"),
    "gray_r",
)
DARK = Theme(
    "dark",
    "#161b26",
    "#e7ebf3",
    "#a3adbf",
    "#2a3242",
    "#5e687b",
    "#f08a4b",
    ("#6aa8f0", "#43c4a8", "#b493ea", "#e37fae"),
    "gray",
)


def png(draw: Callable[[Run, Theme], Figure], run: Run, theme: Theme) -> bytes:
    with rc_context(theme.settings()):
        buffer = io.BytesIO()
        draw(run, theme).savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()


def over_steps(axes: Axes, run: Run, theme: Theme, y: str, words: bool = True) -> Axes:
    """Marks where other processes, at another world size, went on."""
    options: Options = run["options"]
    axes.set(xlabel="optimizer step", ylabel=y)
    axes.axvline(options.steps, color=theme.faint, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    if words:
        style: dict[str, Any] = {
            "ha": "right",
            "va": "bottom",
            "fontsize": 8.5,
            "color": theme.faint,
            "textcoords": "offset points",
        }
        note = f"resumed, {options.ranks} → {options.resume_ranks} ranks"
        axes.annotate(note, (options.steps, 1.0), xycoords=("data", "axes fraction"), xytext=(4, 2), **style)
    return axes
