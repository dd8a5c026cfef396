"""Small runs that leave snapshots behind: one tensor, whose values at each step are drawn by the step alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardow

SIZE = 24


class Walk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))


def weights(step: int) -> torch.Tensor:
    """Of step ``step``: a drift with noise, as in training."""
    noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(step + 1), dtype=torch.float64)
    return torch.linspace(-2, 3, SIZE, dtype=torch.float64) * (1 - 0.99**step) + 0.3 * noise


def put(model: Walk, step: int) -> None:
    with torch.no_grad():
        model.weight.copy_(weights(step))


def put_everywhere(model: nn.Module, step: int) -> None:
    """Of step ``step``, whatever the model's sharding."""
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float(step) ** 0.5)


def started(decay: Any, **options: Any) -> tuple[Walk, shardow.EMA]:
    model = Walk()
    put(model, 0)
    return model, shardow.EMA(model, decay=decay, **{"dtype": torch.float64, "stochastic": False, **options})


def go_on(
    model: Walk, ema: shardow.EMA, steps: Iterable[int], directory: Path, every: int, samples: int = 0, **how: Any
) -> None:
    for step in steps:
        put(model, step)
        ema.update(step=step, samples=samples * step)
        ema.snapshot(directory, every, **how)


def run(
    directory: Path, decay: Any, steps: Iterable[int] = range(1, 241), every: int = 30, samples: int = 0, **options: Any
) -> None:
    go_on(*started(decay, **options), steps, directory, every, samples)


def powers(*sigma_rels: float) -> list[shardow.Schedule]:
    return [shardow.schedules.power(one) for one in sigma_rels]


def steps_there(directory: Path) -> list[int]:
    return sorted(int(one.name.removeprefix("snapshot-")) for one in directory.glob("snapshot-*"))
