"""A model in BAGEL's image, wrapped as it wraps."""

from __future__ import annotations

from collections.abc import Mapping

import models
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardow.compat.bagel import FSDPConfig, fsdp_ema_setup, fsdp_wrapper

FULL = FSDPConfig("FULL_SHARD", "BACKWARD_PRE", False, 1, 2)


class TimestepEmbedder(nn.Sequential):
    """One of the classes that BAGEL wraps."""


class PositionEmbedding(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.arange(float(count * 4)).view(count, 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.pos_embed[0]


class Bagel(nn.Module):
    """Units, a tied head, a frozen table of positions, a buffer."""

    def __init__(self, positions: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.first = TimestepEmbedder(nn.Linear(4, 5), nn.SiLU(), nn.Linear(5, 4))
        self.second = TimestepEmbedder(nn.Linear(4, 3), nn.Linear(3, 4))
        self.latent_pos_embed = PositionEmbedding(positions)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.latent_pos_embed(self.embed(tokens))
        logits: torch.Tensor = self.head(self.second(self.first(hidden)))
        return logits


def made(seed: int = 0, positions: int = 3) -> Bagel:
    torch.manual_seed(seed)
    return Bagel(positions)


def pair(kind: str, config: FSDPConfig = FULL) -> tuple[nn.Module, nn.Module]:
    """(ema_model, model), which begin equal."""
    if kind == "fsdp1":
        return fsdp_ema_setup(made(), config), fsdp_wrapper(made(), config)
    found = [made(), made()]
    for model in found if kind == "fsdp2" else []:
        for unit in (model.first, model.second):
            fully_shard(unit)
        fully_shard(model)
    return found[0].requires_grad_(False), found[1]


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return models.whole_weights(model)


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
