"""A generator such as Self-Forcing trains, and its averages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import shardow
from shardow.compat.causal_forcing import EMA_FSDP, fsdp_wrap

State = dict[str, torch.Tensor]


def assert_same(found: State, expected: State) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor), name


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.ffn = nn.Linear(6, 6), nn.Linear(6, 9)
        self.gate = nn.Parameter(torch.rand(8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ffn(self.q(x))[:, :6] * self.gate[0]  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.register_buffer("freqs", torch.arange(3.0))
        self.head = nn.Linear(6, 5)
        self.modulation = nn.Parameter(torch.rand(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)) + self.modulation[1]  # type: ignore[no-any-return]


class Wrapper(nn.Module):
    """As WanDiffusionWrapper: the network is at .model."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = Net().to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)  # type: ignore[no-any-return]


def generator(**options: Any) -> FullyShardedDataParallel:
    """Every block, and what holds it, wrapped: several prefixes in one key."""
    return fsdp_wrap(Wrapper(options.pop("dtype", torch.float32)), **{"min_num_params": 40, **options})


@torch.no_grad()
def shake(model: nn.Module, seed: int) -> None:
    """The same change of the whole on any number of ranks."""
    whole = Wrapper()
    torch.manual_seed(seed)
    for p in whole.parameters():
        p.normal_()
    shardow.materialize(model, {**dict(whole.named_buffers()), **dict(whole.named_parameters())})


def averaged(model: nn.Module, **options: Any) -> EMA_FSDP:
    ema = EMA_FSDP(model, 0.5, **options)
    for seed in (1, 2):
        shake(model, seed)
        ema.update(model)
    return ema


def expected() -> State:
    model = Wrapper()
    return averaged(model).full_state_dict()
