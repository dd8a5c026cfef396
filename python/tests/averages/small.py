"""A small model of one process, and a training of random steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

DECAY = 0.99


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.ReLU(), nn.Linear(13, 5, bias=False))
    return model.to(dtype)


def train(model: nn.Module, steps: int = 1, after: Callable[[], Any] = lambda: None, seed: int = 1) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(9, 7, generator=generator).to(dtype)).square().mean().backward()
        optimizer.step()
        after()


def clone(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit for bit, in any order."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and torch.equal(_bytes(a[n]), _bytes(b[n])) for n in a
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
