"""Three small models and a training that is none: weights and statistics wander by seeded noise, the same for every
average that watches."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

STEPS = 1000  # of every comparison with an origin


class _Blocks(nn.Module):
    """Attention, a frozen table, a buffer that is not saved, a scalar weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.table.weight.requires_grad_(False)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("positions", torch.arange(5.0)[:, None] / 5, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.block(self.table(tokens) + self.positions) * self.scale
        return mixed


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def _conv() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, stride=2),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    return model.to(memory_format=torch.channels_last)


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 37),
        nn.BatchNorm1d(37),
        nn.SiLU(),
        nn.Linear(37, 19),
        nn.LayerNorm(19),
        nn.Linear(19, 3, bias=False),
    )


_MODELS = {"mlp": (_mlp, (4, 6)), "conv": (_conv, (2, 3, 8, 8)), "blocks": (_Blocks, (2, 5))}
NAMES = tuple(_MODELS)


def model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return _MODELS[name][0]().to(dtype)


def inputs(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = _MODELS[name][1]
    return torch.randint(11, shape) if name == "blocks" else torch.randn(shape).to(dtype)


@torch.no_grad()
def walk(model: nn.Module, name: str, steps: int = STEPS) -> Iterator[int]:
    """After each step its number, from 1. Frozen weights stay; statistics of batches move."""
    generator = torch.Generator().manual_seed(7)
    trained = [p for p in model.parameters() if p.requires_grad]
    for number in range(1, steps + 1):
        for p in trained:
            local = getattr(p, "_local_tensor", p)
            local.add_(torch.randn(local.shape, generator=generator).to(local.dtype), alpha=0.05)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.mul_(0.9).add_(torch.rand(buffer.shape, generator=generator).to(buffer.dtype), alpha=0.1)
            else:
                buffer.add_(1)
        yield number


def through_a_file(state: Any) -> Any:
    """What torch.save() and torch.load() make of it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer)
