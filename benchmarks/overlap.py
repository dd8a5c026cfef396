"""``python -m benchmarks.overlap``: what averages cost a training step on a CPU, in the background and not, beside what
is used elsewhere.

Every candidate trains a model of its own, one thread at work and one processor idle. A burst of steps begins while the
averages of the step before it are under way, as in a long run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import shardow
from benchmarks import peers, report
from benchmarks.measure import Bar, Timing, at_most, interleaved

NONE, OVERLAPPED = "no averages", "shardow, overlap=True"
DECAY, BURST = 0.999, 4


@dataclass(frozen=True)
class Results:
    elements: int
    timings: dict[str, Timing]  # of a step
    hidden: float  # seconds of averaging a step, in the background
    waited: float  # of it, in which the next step waited


class Training:
    """One model, its optimizer and its batch, of a ``kind`` (device, dtype). ``after``: called after each step."""

    def __init__(self, width: int, layers: int, batch: int, **kind: Any) -> None:
        torch.manual_seed(0)
        parts = (part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU()))
        self.model = nn.Sequential(*parts).to(**kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randn(batch, width, **kind)
        self.after: Callable[[], object] = lambda: None

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.after()


def seconds_offloaded(stats: dict[str, Any]) -> tuple[float, float]:
    """Returns the seconds of averaging a step that were hidden, and those that the next step waited for."""
    return stats["offload/hidden_seconds"] / stats["updates"], stats["offload/waited_seconds"] / stats["updates"]


def run(quick: bool = False, rounds: int = 15) -> Results:
    torch.set_num_threads(1)
    size = (64, 2, 8) if quick else (1024, 12, 256)
    trainings = {name: Training(*size, dtype=torch.float32) for name in (NONE, OVERLAPPED, *AFTER)}
    overlapped = trainings[OVERLAPPED]
    ema = shardow.EMA(overlapped.model, DECAY, overlap=True, optimizer=overlapped.optimizer)
    for name, after in AFTER.items():
        trainings[name].after = after(trainings[name].model)
    steps = {name: training.step for name, training in trainings.items()}
    timings = interleaved(steps, NONE, rounds, burst=BURST)
    elements = sum(p.numel() for p in overlapped.model.parameters())
    return Results(elements, timings, *seconds_offloaded(ema.stats()))


AFTER: dict[str, Callable[[nn.Module], Callable[[], object]]] = {
    "shardow": lambda model: shardow.EMA(model, DECAY, threads=1).update,
    "AveragedModel": lambda model: peers.averaged_model(peers.library("torch.optim.swa_utils"), model, DECAY).step,
    "timm ModelEmaV3": lambda model: peers.timm_v3(peers.library("timm"), model, DECAY).step,
}


def lines(results: Results) -> list[str]:
    rows = []
    for name, timing in results.timings.items():
        low, high = timing.spread
        rows.append((name, f"{timing.median * 1e3:.1f}", f"{1 / timing.ratio:.3f} ({1 / high:.3f} to {1 / low:.3f})"))
    head = ("a step with averages", "milliseconds", "times as long as without (10th to 90th percentile)")
    return [
        f"A training step (AdamW) of {results.elements / 1e6:.0f} M elements on one thread, one processor idle; "
        f"of averaging a step {results.hidden * 1e3:.1f} ms hidden, {results.waited * 1e3:.1f} ms waited for",
        "",
        *report.table(head, rows),
    ]


def bars(results: Results) -> list[Bar]:
    cost = 1 / results.timings[OVERLAPPED].ratio
    return [at_most("overlap: a step with averages, times one without", cost, 1.05)]


if __name__ == "__main__":
    report.main(sys.modules[__name__])
