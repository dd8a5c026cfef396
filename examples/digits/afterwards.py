"""Averages that nobody tracked: made after training from snapshots of two others, beside the same ones tracked
(docs/posthoc.md), and from raw checkpoints (docs/merging.md)."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardow
from shardow import posthoc

from . import shard
from .evaluate import Judge
from .options import Options

SNAPPED = (0.05, 0.1)  # widths, sigma_rel, of the averages that snapshots are taken of
TRACKED = (0.07, 0.15, 0.2)  # that are synthesised from these, and for comparison tracked too
MADE = (0.04, 0.1, 0.25)  # that are synthesised alone, for the curve of distances over widths
SNAPSHOTS = 24  # over the training
FOLDER = "afterwards"
RAW_CHECKPOINTS = 12  # of the weights themselves, over the training
MERGES: dict[str, dict[str, Any]] = {  # what is made of these, by the arguments of shardow.merged()
    "mean of the last three": {"lawa": 3},
    "mean of the last six": {"lawa": 6},
    "all, as a linear decay of the learning rate": {"curve": "linear"},
}
ARITHMETIC = 2e-6  # of averages in float32, in parts of the largest weight


@dataclass
class Width:
    """Of one average: what its plan promises; how far it is from the tracked one, at most over all weights, and in
    parts of what is promised there; Frechet distances."""

    sigma_rel: float
    residual: float
    variation: float
    rounding: float
    snapshots: int
    off: float
    share: float
    tracked: float
    made: float


class Afterwards:
    """While a model trains: two EMAs, and the span that each weight covers. Collective where an EMA is."""

    def __init__(self, model: torch.nn.Module, options: Options) -> None:
        self.model, self.options, self.group = model, options, shard.ema_group(options.shard)
        self.out, self.raw = options.out / FOLDER, list[Path]()
        if dist.get_rank() == 0:
            shutil.rmtree(self.out, ignore_errors=True)
        dist.barrier()
        self.snapped, self.tracked = (
            shardow.EMA(model, decay=list(map(shardow.schedules.power, widths)), group=self.group)
            for widths in (SNAPPED, TRACKED)
        )
        self.least, self.most = _weights(model), _weights(model)

    @torch.no_grad()
    def step(self) -> None:
        """After an optimizer step."""
        for ema in (self.snapped, self.tracked):
            ema.update()
        self.snapped.snapshot(self.out, max(1, self.options.steps // SNAPSHOTS))
        if (step := self.snapped.step) % max(1, self.options.steps // RAW_CHECKPOINTS) == 0:
            self.raw.append(self.out / f"raw-step-{step}.safetensors")
            shardow.save(self.model, self.raw[-1], group=self.group)
        for weights, least, most in zip(_weights(self.model, copied=False), self.least, self.most, strict=True):
            torch.minimum(least, weights, out=least)
            torch.maximum(most, weights, out=most)

    def compare(self, judge: Judge) -> dict[str, Any]:
        """The weights are what they were afterwards. Rank 0's distances; collective."""
        weights = self.out / "weights.safetensors"
        shardow.save(self.model, weights, group=self.group)
        widths = [vars(self._compare(width, judge)) for width in TRACKED]
        more = {width: judge.distance(judge.sample(self._synthesised(width))) for width in MADE}
        merges = {}
        for name, how in MERGES.items():
            shardow.load(self.model, shardow.merged(self.raw, **how), group=self.group)
            merges[name] = judge.distance(judge.sample(self.model))
        shardow.load(self.model, weights, group=self.group)
        return {"widths": widths, "more": more, "merges": merges, "raw": len(self.raw)}

    def _synthesised(self, width: float) -> torch.nn.Module:
        out = self.out / f"synthesised-{width}.safetensors"
        posthoc.synthesize(self.out, sigma_rel=width, out=out)
        shardow.load(self.model, out, strict=False, group=self.group)
        return self.model

    def _compare(self, width: float, judge: Judge) -> Width:
        with self.tracked.swapped(decay=shardow.schedules.power(width)):
            tracked, online = _weights(self.model), judge.distance(judge.sample(self.model))
        out = self.out / f"synthesised-{width}.safetensors"
        plan: posthoc.Plan = posthoc.synthesize(self.out, sigma_rel=width, out=out)["plan"]
        shardow.load(self.model, out, strict=False, group=self.group)
        off, share = self._off(tracked, plan)
        made = judge.distance(judge.sample(self.model))
        return Width(width, plan.residual, plan.variation, plan.rounding, len(plan.terms), off, share, online, made)

    def _off(self, tracked: list[torch.Tensor], plan: posthoc.Plan) -> tuple[float, float]:
        largest = torch.zeros(2)
        for made, wanted, least, most in zip(
            _weights(self.model, copied=False), tracked, self.least, self.most, strict=True
        ):
            size = torch.maximum(most.abs(), least.abs())
            promised = plan.variation * (most - least) + (plan.rounding + ARITHMETIC * plan.size) * size
            off = (made - wanted).abs()
            if off.numel():
                largest = torch.maximum(largest, torch.stack([off.max(), (off / promised.clamp_min(1e-12)).max()]))
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest[0]), float(largest[1])


def _weights(model: torch.nn.Module, copied: bool = True) -> list[torch.Tensor]:
    """This rank's, of a model that has not been called since its weights were last written: FSDP keeps the root whole
    after a call.
    """
    local = [shard.local(p.detach()) for p in model.parameters()]
    return [one.clone() for one in local] if copied else local
