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
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardow
from benchmarks import report
from benchmarks.measure import Timing, bursts
from benchmarks.peers import timm_file

NONE, OVERLAPPED = "no averages", "shardow, overlap=True"
DECAY, BURST = 0.999, 4


@dataclass(frozen=True)
class Results:
    elements: int
    timings: dict[str, Timing]  # of a burst
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


def run(quick: bool = False, rounds: int = 15) -> Results:
    torch.set_num_threads(1)
    made = {
        name: Training(*((64, 2, 8) if quick else (1024, 12, 256)), dtype=torch.float32)
        for name in (NONE, OVERLAPPED, *AFTER)
    }
    ema = shardow.EMA(made[OVERLAPPED].model, DECAY, overlap=True, optimizer=made[OVERLAPPED].optimizer)
    for name, after in AFTER.items():
        made[name].after = after(made[name].model)
    timings = bursts([(name, training.step) for name, training in made.items()], NONE, rounds, BURST)
    stats = ema.stats()
    hidden, waited = (stats[f"offload/{one}_seconds"] / stats["updates"] for one in ("hidden", "waited"))
    return Results(sum(p.numel() for p in made[NONE].model.parameters()), timings, hidden, waited)


def _shardow(model: nn.Module) -> Callable[[], object]:
    return shardow.EMA(model, DECAY, threads=1).update


def _averaged_model(model: nn.Module) -> Callable[[], object]:
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    return lambda: averaged.update_parameters(model)


def _timm(model: nn.Module) -> Callable[[], object]:
    averaged = timm_file().ModelEmaV3(model, DECAY)
    return lambda: averaged.update(model)


AFTER = {"shardow": _shardow, "AveragedModel": _averaged_model, "timm ModelEmaV3": _timm}


def lines(results: Results) -> list[str]:
    rows = [
        f"A training step (AdamW) of {results.elements / 1e6:.0f} M elements on one thread, one processor idle; "
        f"of averaging a step {results.hidden * 1e3:.1f} ms hidden, {results.waited * 1e3:.1f} ms waited for",
        "",
        "| a step with averages | milliseconds | times as long as without (10th to 90th percentile) |",
        "|---|---|---|",
    ]
    for name, timing in results.timings.items():
        low, high = timing.spread
        rows.append(
            f"| {name} | {timing.median / BURST * 1e3:.1f} | {1 / timing.ratio:.3f} ({1 / high:.3f} to {1 / low:.3f}) |"
        )
    return rows


def bars(results: Results) -> list[tuple[str, float, float, bool]]:
    cost = 1 / results.timings[OVERLAPPED].ratio
    return [("overlap: a step with averages, times one without (at most)", cost, 1.05, cost <= 1.05)]


if __name__ == "__main__":
    report.main(sys.modules[__name__])
