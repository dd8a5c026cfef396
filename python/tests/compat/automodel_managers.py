"""Managers of NeMo Automodel, their models, and what is asked of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import models
import torch
from torch import nn

from shardow.compat.automodel import EMAManager, ShardedModelEMAManager

Manager = EMAManager | ShardedModelEMAManager
BOTH = ("shadow", "sharded_model")


def made(kind: str, model: nn.Module, decay: float = 0.5, build: Callable[[], nn.Module] = models.make) -> Manager:
    return EMAManager(model, decay) if kind == "shadow" else ShardedModelEMAManager(build(), model, decay)


def local(tensor: torch.Tensor) -> torch.Tensor:
    memory: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return memory.detach()


def wander(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                local(p).add_(torch.randn(local(p).shape, generator=generator).to(p.dtype), alpha=0.1)


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(local(a[name]), local(b[name])) for name in a)
