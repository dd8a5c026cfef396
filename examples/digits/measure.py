"""What training holds on a rank, beside its plan, and what the averages cost.

That is memory on every rank, and the time of an update beside the ways in which it is done elsewhere.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import shardow

from . import averages, data, diffusion, shard
from .model import DiT
from .options import Options

WARM, ROUNDS = 10, 300
SHARDOW, FOREACH, SOURCES = "shardow", "torch foreach lerp", "mul_().add_() per tensor"


def costs(model: torch.nn.Module, ema: shardow.EMA | None, options: Options) -> dict[str, Any]:
    """Collective. Bytes are what EMA.stats() reports on each rank; a full copy is float32 for every parameter and
    decay.
    """
    parameters = sum(p.numel() for p in _on_meta(options).parameters())
    return {
        "bytes": bytes_per_rank(ema),
        "full_copy": 4 * parameters * len(options.decays),
        "parameters": parameters,
        "seconds": {} if ema is None else update_seconds(model, options),
        "threads": torch.get_num_threads(),
        "rounds": ROUNDS,
    }


def bytes_per_rank(ema: shardow.EMA | None) -> list[int]:
    return _from_all(0 if ema is None else int(ema.stats()["bytes"]))


def planned_and_measured(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: shardow.EMA | None,
    batch: data.Batch,
    options: Options,
) -> dict[str, dict[str, int]]:
    """Bytes on the fullest rank by what takes them. Collective.

    As memory.plan() says of a model that nobody built, and as memory.measure() finds after a step.
    """
    world = dist.get_world_size()

    def error(velocity: torch.Tensor) -> torch.Tensor:
        return diffusion.error(velocity, batch, world)

    plan = shardow.memory.plan(
        _on_meta(options), world, options.shard, optimizer=type(optimizer), batch=diffusion.inputs(batch),
        switches=options.switches(), averages=len(options.decays), loss=error,
        shards=shard.shards(options.shard, world) if options.shard == "hsdp" else None,
    )  # fmt: skip
    everywhere = _from_all(shardow.memory.measure(model, optimizer, diffusion.inputs(batch), ema=ema, loss=error))
    first = _from_all(plan)[0]  # whose batch is the largest
    return {
        key: {"planned": first[key], "measured": max(found[key] for found in everywhere)}
        for key in first
        if key != "saves"
    }


def _on_meta(options: Options) -> DiT:
    with torch.device("meta"):
        return DiT(options.width, options.depth)


def _from_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def update_seconds(model: torch.nn.Module, options: Options) -> dict[str, list[float]]:
    """On this rank's part, with the same number of threads, into averages of their own. The schedule is the run's."""
    ema = averages.make(model, options, threads=torch.get_num_threads())
    weights = [shard.local(p) for p in model.parameters() if p.requires_grad]
    copies = [[w.clone() for w in weights] for _ in options.decays]

    def foreach() -> None:
        for decay, mine in zip(options.decays, copies, strict=True):
            torch._foreach_lerp_(mine, weights, 1 - decay)

    def sources() -> None:
        for decay, mine in zip(options.decays, copies, strict=True):
            for average, weight in zip(mine, weights, strict=True):
                average.mul_(decay).add_(weight, alpha=1 - decay)

    return _in_turn({SHARDOW: ema.update, FOREACH: foreach, SOURCES: sources})


@torch.no_grad()
def _in_turn(ways: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Lower quartile, median and upper quartile of each, in seconds. What disturbs one disturbs all, and none is always
    first.
    """
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    dist.barrier()
    for i in range(WARM + ROUNDS):
        for name in (*names[i % len(names) :], *names[: i % len(names)]):
            begin = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.quantiles(values[WARM:], n=4) for name, values in seconds.items()}
