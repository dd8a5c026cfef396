"""DistEMA beside dense averages; models with awkward tensors."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardow.compat.dist_ema import DistEMA


class Dense:
    """The origin's recursion, every element on one rank."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.options = {
            "decay": 0.999,
            "warmup": False,
            "power": None,
            "min_decay": 0.0,
            "inv_gamma": 1.0,
            "update_after_step": 0,
            **options,
        }
        self.averages = OrderedDict((name, p.detach().clone().float()) for name, p in model.named_parameters())
        self.steps = 0

    def decay(self) -> float:
        o = self.options
        if not o["warmup"]:
            return float(o["decay"])
        step = max(0, self.steps - o["update_after_step"] - 1)
        return float(max(o["min_decay"], min(1 - (1 + step / o["inv_gamma"]) ** -o["power"], o["decay"])))

    @torch.no_grad()
    def update(self, model: nn.Module, decay: float | None = None) -> None:
        decay = self.decay() if decay is None else decay
        for name, p in model.named_parameters():
            self.averages[name].mul_(decay).add_(p.detach(), alpha=1.0 - decay)
        self.steps += 1


def alone() -> tuple[int, int]:
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor), name


class Awkward(nn.Module):
    """A number, nothing, many dimensions, strides of its own, statistics."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.number = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0, 3))
        self.conv = nn.Conv2d(3, 5, (3, 2)).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(4, 3, 2).permute(2, 0, 1))
        self.norm = nn.BatchNorm1d(7)


def made(**options: Any) -> tuple[Awkward, DistEMA]:
    model = Awkward()
    ema = DistEMA(model, *alone(), **{"decay": 0.5, "warmup": True, "power": 0.75, **options})
    for seed in range(1, 5):
        with torch.no_grad():
            for p, new in zip(model.parameters(), Awkward(seed).parameters(), strict=True):
                p.copy_(new)
            model.norm.running_mean.fill_(seed)
        ema.update(model)
    return model, ema


def expected() -> OrderedDict[str, torch.Tensor]:
    model = Awkward()
    dense = Dense(model, decay=0.5, warmup=True, power=0.75)
    for seed in range(1, 5):
        dense.update(Awkward(seed))
    return dense.averages
