"""Rows of benchmarks.scale, and the exponent of a power law."""

from __future__ import annotations

import math
from collections.abc import Mapping


def exponent(points: list[tuple[float, float]]) -> float:
    """Of the power law through them, by least squares of logarithms; NaN where there are fewer than two."""
    if len(points) < 2:
        return math.nan
    xs, ys = [math.log(x) for x, _ in points], [math.log(max(y, 1e-9)) for _, y in points]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def row(title: str, facts: Mapping[str, Mapping[str, float]]) -> None:
    """One line for each kind of call."""
    for what, figures in facts.items():
        print(
            f"{title:>14}  {what:<14} " + "  ".join(f"{name} {number(value)}" for name, value in figures.items()),
            flush=True,
        )
