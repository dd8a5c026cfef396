"""Interleaved timing: in every round each step runs once, in an order drawn anew, and is compared with the limit of the
same round. Bars say what is asked of figures.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Step = Callable[[], object]


class Bar(NamedTuple):
    what: str
    measured: float
    asked: float
    met: bool


def at_least(what: str, measured: float, asked: float) -> Bar:
    return Bar(what, measured, asked, measured >= asked)


def at_most(what: str, measured: float, asked: float) -> Bar:
    return Bar(f"{what} (at most)", measured, asked, measured <= asked)


@dataclass(frozen=True)
class Timing:
    """Seconds of each round, and the share of the limit's speed: limit / own, round by round."""

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


def seconds_of(step: Step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def interleaved(
    steps: Mapping[str, Step], limit: str, rounds: int, burst: int = 1, clock: Callable[[Step], float] = seconds_of
) -> dict[str, Timing]:
    """Returns the seconds of one call of each step, by ``clock``. ``limit`` names the step that the others are compared
    with. Each runs twice untimed first.

    ``burst`` calls are timed together. Of several each begins with what the call before has left under way: one more
    goes before them, untimed.
    """
    for step in steps.values():
        step()
        step()
    order = list(steps)
    shuffle = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            if burst > 1:
                steps[name]()
            seconds[name].append(clock(lambda step=steps[name]: [step() for _ in range(burst)]) / burst)
    limits = seconds[limit]
    return {name: Timing(own, [a / b for a, b in zip(limits, own, strict=True)]) for name, own in seconds.items()}


def median_and_range(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
