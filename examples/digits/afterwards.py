"""Averages that were not tracked: made after training from snapshots of two others, beside the same ones tracked
(docs/posthoc.md), and from raw checkpoints (docs/merging.md)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

import shardow
from shardow import posthoc

from . import model
from .judge import Judge
from .options import Options

SNAPPED = (0.05, 0.1)  # widths, sigma_rel, of the averages that snapshots are taken of
TRACKED = (0.07, 0.15, 0.2)  # that are synthesised from these, and for comparison tracked too
MADE = (0.04, 0.1, 0.25)  # that are synthesised alone
SNAPSHOTS = 24  # over the training
RAW_CHECKPOINTS = 12  # of the weights themselves, over the training
MERGES: dict[str, dict[str, Any]] = {  # arguments of shardow.merged()
    "mean of the last three": {"lawa": 3},
    "mean of the last six": {"lawa": 6},
    "all, as a linear decay of the learning rate": {"curve": "linear"},
}


class Afterwards:
    """Two EMAs beside a model that trains. Collective where an EMA is."""

    def __init__(self, network: torch.nn.Module, options: Options) -> None:
        self.network, self.options, self.group = network, options, model.ema_group(options.shard)
        self.out, self.raw = options.out / "afterwards", list[Path]()
        if dist.get_rank() == 0:
            shutil.rmtree(self.out, ignore_errors=True)
        dist.barrier()
        self.snapped, self.tracked = (
            shardow.EMA(network, decay=list(map(shardow.schedules.power, widths)), group=self.group)
            for widths in (SNAPPED, TRACKED)
        )

    def step(self) -> None:
        """Follows an optimizer step."""
        for ema in (self.snapped, self.tracked):
            ema.update()
        self.snapped.snapshot(self.out, max(1, self.options.steps // SNAPSHOTS))
        if (step := self.snapped.step) % max(1, self.options.steps // RAW_CHECKPOINTS) == 0:
            self.raw.append(self.out / f"raw-step-{step}.safetensors")
            shardow.save(self.network, self.raw[-1], group=self.group)

    def compare(self, judge: Judge) -> dict[str, Any]:
        """Rank 0's distances. The weights are afterwards what they were. Collective."""
        weights, tracked, made, plans, merges = self.out / "weights.safetensors", {}, {}, {}, {}
        shardow.save(self.network, weights, group=self.group)
        total = 2 * len(TRACKED) + len(MADE) + len(MERGES)
        with tqdm(None, "  Judging averages made afterwards", total, False, disable=dist.get_rank() > 0 or None) as bar:

            def distance() -> float:
                bar.update()
                return judge.distance(self.network)

            for width in TRACKED:
                with self.tracked.swapped(decay=shardow.schedules.power(width)):
                    tracked[width] = distance()
            for width in sorted(TRACKED + MADE):
                out = self.out / f"synthesised-{width}.safetensors"
                plan: posthoc.Plan = posthoc.synthesize(self.out, sigma_rel=width, out=out)["plan"]
                plans[width] = {"residual": plan.residual, "variation": plan.variation, "snapshots": len(plan.terms)}
                shardow.load(self.network, out, strict=False, group=self.group)
                made[width] = distance()
            for name, how in MERGES.items():
                shardow.load(self.network, shardow.merged(self.raw, **how), group=self.group)
                merges[name] = distance()
        shardow.load(self.network, weights, group=self.group)
        return {"tracked": tracked, "made": made, "plans": plans, "merges": merges, "raw": len(self.raw)}
