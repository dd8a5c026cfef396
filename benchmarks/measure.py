"""Interleaved timing: in every round each candidate runs once, in an order drawn anew, and is compared with the limit
of the same round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of each round, and how many of the limit's speed: limit / own, round by round."""

    seconds: list[float]
    ratios: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """10th and 90th percentile of the ratios."""
        ordered = sorted(self.ratios)
        return ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]

    @property
    def cell(self) -> str:
        low, high = self.spread
        return f"{self.ratio:.2f} ({low:.2f} to {high:.2f}), {self.median * 1e3:.2f} ms"


def interleaved(steps: Sequence[tuple[str, Callable[[], object]]], limit: str, rounds: int) -> dict[str, Timing]:
    """``limit`` names the step that the others are compared with. Each step runs twice untimed first."""
    return _rounds(steps, limit, rounds, lead=0, burst=1)


def bursts(steps: Sequence[tuple[str, Callable[[], object]]], limit: str, rounds: int, burst: int) -> dict[str, Timing]:
    """The same of ``burst`` steps at a time, of which each begins with what the one before has left under way: one more
    goes before them, untimed."""
    return _rounds(steps, limit, rounds, lead=1, burst=burst)


def _rounds(
    steps: Sequence[tuple[str, Callable[[], object]]], limit: str, rounds: int, lead: int, burst: int
) -> dict[str, Timing]:
    """``lead`` steps untimed, then ``burst`` timed, in each round."""
    for _, step in steps:
        step()
        step()
    order = list(steps)
    shuffle = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name, _ in steps}
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name, step in order:
            for _ in range(lead):
                step()
            began = time.perf_counter()
            for _ in range(burst):
                step()
            seconds[name].append(time.perf_counter() - began)
    limits = seconds[limit]
    return {name: Timing(own, [a / b for a, b in zip(limits, own, strict=True)]) for name, own in seconds.items()}
