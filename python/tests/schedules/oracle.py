"""Averages of one number, in float64: what the engine is held against.

Written from docs/schedules.md and the papers and projects that it names.

decay(kind, numbers, n) is that of step n, the first being 1; one update over several steps multiplies theirs. Slow and
plain.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import mpmath

Numbers = dict[str, float]


def warm(m: float, gamma: float, power: float) -> float:
    return 1 - (1 + m / gamma) ** -power


def ramp(n: int, steps: float) -> float:
    return 1.0 if steps <= 1 else min(1.0, (n - 1) / (steps - 1))


@functools.cache
def edm2_gamma(sigma: float) -> float:
    """EDM2, algorithm 2: the largest real root of sigma^2 (g + 2)^2 (g + 3) = g + 1."""
    t = sigma**-2
    return float(
        max(
            root.real
            for root in mpmath.polyroots([1, 7, 16 - t, 12 - t], maxsteps=200, extraprec=200)
            if abs(root.imag) < 1e-9
        )
    )


def decay(kind: str, x: Numbers, n: int) -> float:
    """Of step n; schedules of updates or samples have none."""
    m = n - x.get("update_after_step", 0) - 1
    match kind:
        case "constant" | "settable":
            return x["decay"]
        case "half_life":
            return float(2 ** (-1 / x["steps"]))
        case "half_life_fraction":
            return float(2 ** (-1 / min(x.get("max_steps", math.inf), x["fraction"] * n)))
        case "inverse_gamma":
            return min(
                x["max_decay"], max(x["min_decay"], warm(max(0.0, n - 1 - x["start"]), x["inv_gamma"], x["power"]))
            )
        case "warmup":
            return min(x["decay"], (1 + n) / (10 + n))
        case "tf_warmup":
            return min(x["decay"], n / (9 + n))
        case "timm":
            if m <= 0:
                return 0.0
            return (
                max(x["min_decay"], min(x["decay"], warm(m, x["gamma"], x["power"]))) if x["use_warmup"] else x["decay"]
            )
        case "diffusers":
            if m <= 0:
                return 0.0
            return max(
                x["min_decay"],
                min(x["decay"], warm(m, x["inv_gamma"], x["power"]) if x["use_ema_warmup"] else (1 + m) / (10 + m)),
            )
        case "dist_ema":
            return (
                max(x["min_decay"], min(x["decay"], warm(max(0.0, m - 1), x["inv_gamma"], x["power"])))
                if x["warmup"]
                else x["decay"]
            )
        case "ema_pytorch":
            return 0.0 if m <= 0 else min(x["beta"], max(x["min_value"], warm(m, x["inv_gamma"], x["power"])))
        case "linear":
            return x["from"] + (x["to"] - x["from"]) * ramp(n, x["steps"])
        case "cosine":
            return x["to"] - (x["to"] - x["from"]) * (math.cos(math.pi * ramp(n, x["steps"])) + 1) / 2
        case "power":
            return float((1 - 1 / n) ** (edm2_gamma(x["sigma_rel"]) + 1))
        case "debiased":
            return 1 - 1 / n if x["decay"] == 1 else 1 - (1 - x["decay"]) / (1 - x["decay"] ** n)
    raise AssertionError(kind)


@dataclass
class Oracle:
    """One average, from its weight at construction on."""

    kind: str
    numbers: Numbers
    value: float
    start_step: int = 0
    update_every: int = 1
    applied: int = 0
    updates: int = 0
    samples: float = 0.0
    least: float = field(default=1.0, init=False)  # the least decay that was used

    def update(self, step: int, weight: float, samples: float) -> None:
        first = self.start_step > 0 and self.applied == 0
        if step <= self.start_step or first:
            self._apply(step, weight, samples, 0.0)
        elif step - self.applied >= self.update_every:
            self._apply(step, weight, samples, self._decay(step, samples))

    def _decay(self, step: int, samples: float) -> float:
        if self.kind == "mean":
            return 1 - 1 / (self.updates + 1)
        if self.kind == "half_life_in_samples":
            return float(2 ** (-(samples - self.samples) / self.numbers["samples"]))
        if self.kind == "window":
            return self._window(step - self.start_step, min(step - self.applied, step - self.start_step))
        steps = range(max(self.applied, self.start_step) + 1, step + 1)
        return math.prod(decay(self.kind, self.numbers, n - self.start_step) for n in steps)

    def _window(self, n: int, since: int) -> float:
        if n < self.numbers["first"] or n > self.numbers["last"]:
            return float(n > self.numbers["last"])
        inside = len(range(n, int(self.numbers["first"]) - 1, -since))
        return 1 - 1 / inside

    def _apply(self, step: int, weight: float, samples: float, kept: float) -> None:
        self.value = kept * self.value + (1 - kept) * weight
        self.least = min(self.least, kept)
        self.applied, self.samples = step, samples
        self.updates += step > self.start_step
