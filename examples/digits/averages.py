"""The averages of this demo: made, named, and compared by hashes."""

from __future__ import annotations

import hashlib

import torch

import shardow

from . import model
from .options import Options

RAW = "raw weights"


def make(network: torch.nn.Module, options: Options) -> shardow.EMA:
    """Collective, as all of EMA that communicates."""
    return shardow.EMA(
        network, decay=schedules(options), device=options.ema_device or None, group=model.ema_group(options.shard)
    )


def schedules(options: Options) -> list[shardow.Schedule]:
    """Debiased: the first weights count no more than any other, so that long averages serve a short training, too."""
    return [shardow.schedules.debiased(decay) for decay in options.decays]


def by_name(options: Options) -> dict[str, shardow.Schedule]:
    """Arguments of ``swapped(decay=...)`` and its like, by the names that the report gives them."""
    return {f"average {decay:g}": schedule for decay, schedule in zip(options.decays, schedules(options), strict=True)}


def hashes(ema: shardow.EMA | None, network: torch.nn.Module, options: Options) -> list[str]:
    """Returns on rank 0 a hash of each full average, and of the full weights. Collective."""
    fulls = [] if ema is None else [ema.full_state_dict(one, complete=False) for one in schedules(options)]
    return [*map(_hash, fulls), weights_hash(network, options)]


def weights_hash(network: torch.nn.Module, options: Options) -> str:
    """New averages begin equal to the weights, and gather them however they are shared. Collective."""
    return _hash(shardow.EMA(network, 0.5, group=model.ema_group(options.shard)).full_state_dict(complete=False))


def memory_hash(network: torch.nn.Module) -> str:
    """A hash of what this rank holds: weights, or averages inside swapped(), where no new averages are made."""
    return _hash({name: getattr(p, "_local_tensor", p.detach()).cpu() for name, p in network.named_parameters()})


def _hash(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
