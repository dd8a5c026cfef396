"""How this demo makes, names and compares its averages."""

from __future__ import annotations

import hashlib

import torch

import shardow

from . import shard
from .options import Options

RAW = "raw weights"


def make(model: torch.nn.Module, options: Options, threads: int = 0) -> shardow.EMA:
    """Collective, as all of EMA that communicates."""
    return shardow.EMA(
        model,
        decay=schedules(options),
        device=options.ema_device or None,
        group=shard.ema_group(options.shard),
        threads=threads,
    )


def schedules(options: Options) -> list[shardow.Schedule]:
    """Debiased: the first weights count no more than any other, so that long averages are of use in a short training,
    too.
    """
    return [shardow.schedules.debiased(decay) for decay in options.decays]


def name_of(decay: float) -> str:
    return f"average {decay:g}"


def by_name(options: Options) -> dict[str, shardow.Schedule]:
    """What ``swapped(decay=...)`` and its like take, by the name that the report gives it."""
    return dict(zip(map(name_of, options.decays), schedules(options), strict=True))


def current_decays(ema: shardow.EMA | None, options: Options) -> list[float]:
    """Of the next step, one for each average."""
    if ema is None:
        return []
    stats = ema.stats()
    return [stats["decay"]] if len(options.decays) == 1 else [stats[f"decay/{k}"] for k in range(len(options.decays))]


def hashes(ema: shardow.EMA | None, options: Options) -> list[str]:
    """One for each average, of the full average on rank 0; of nothing elsewhere. Collective."""
    return (
        [] if ema is None else [_hash(ema.full_state_dict(schedule, complete=False)) for schedule in schedules(options)]
    )


def weights_hash(model: torch.nn.Module, options: Options) -> str:
    """Of the full weights, however they are shared: new averages begin equal to the weights and can be gathered.
    Collective.
    """
    return _hash(shardow.EMA(model, 0.5, group=shard.ema_group(options.shard)).full_state_dict(complete=False))


def memory_hash(model: torch.nn.Module) -> str:
    """Of what this rank holds, whatever that is: weights, or averages inside swapped(), where no new averages are
    made."""
    return _hash({name: shard.local(p).cpu() for name, p in model.named_parameters()})


def _hash(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
