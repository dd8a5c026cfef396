"""Networks of many kinds of layers, sharded in several ways, and what is compared of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import models
import torch
import torch.distributed as dist
from test_wrap import train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import shardow

State = Mapping[str, torch.Tensor]
KINDS = [
    (strategy, world, orig)
    for strategy, world in (("FULL_SHARD", 2), ("FULL_SHARD", 4), ("HYBRID_SHARD", 4))
    for orig in (True, False)
]


FSDP1 = KINDS if os.environ.get("SHARDOW_ALL") else [KINDS[0], KINDS[5]]


class Block(nn.Module):
    """Two tied weights, and buffers that files have: one of them under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.down.weight = self.up.weight
        scale = torch.tensor([0.5, 0.25, 0.125])
        self.register_buffer("scale", scale)
        self.register_buffer("gain", scale)
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.register_buffer("calls", torch.tensor(2**60 + 1))

    def reset_parameters(self) -> None:
        self.scale.copy_(torch.rand(3))
        self.calls.fill_(7)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.up(self.norm(hidden)).relu()) * self.scale.sum() + self.table / 8


class Net(nn.Module):
    """Rows 9, 6 and 1: uneven on 2 and 4 ranks, and empty on some."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.narrow = nn.Linear(6, 1)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.narrow(hidden)


def net(seed: int | None) -> Net:
    """Seed None: on meta."""
    if seed is None:
        with shardow.meta_init():
            return Net()
    torch.manual_seed(seed)
    model = Net()
    with torch.no_grad():
        for block in model.blocks:
            block.scale.uniform_()
    return model


def by_modules(seed: int) -> Net:
    """What materialize() without a source is to make."""
    model = net(0)
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def fsdp1(model: Net, strategy: str, orig: bool) -> nn.Module:
    world = dist.get_world_size()
    options: dict[str, Any] = {
        "device_id": torch.device("cpu"),
        "use_orig_params": orig,
        "sharding_strategy": ShardingStrategy[strategy],
    }
    if strategy == "HYBRID_SHARD":
        options["device_mesh"] = init_device_mesh("cpu", (2, world // 2))
    if model.embed.weight.is_meta:
        options["param_init_fn"] = shardow.to_empty
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def fsdp2(model: nn.Module, units: str = "blocks") -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in dict(model.named_modules())[units].children():
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights, and buffers that files have or not."""
    buffers = {
        name.replace("_fsdp_wrapped_module.", "").removeprefix("module."): b for name, b in model.named_buffers()
    }
    return {**models.whole_weights(model), **buffers}


def same(a: State, b: State) -> bool:
    """Or an error that names what differs in a bit."""
    differing = sorted(name for name in {*a, *b} if name not in a or name not in b or not same_bits(a[name], b[name]))
    assert not differing, differing
    return True


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(*(one.detach().reshape(-1).view(torch.uint8) for one in (a, b)))
    )


def train_alike(model: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module) -> bool:
    """Five losses, and what is there afterwards: ties, and memory that is the model's."""
    expected = train(reference, adamw(reference))
    assert torch.equal(torch.stack(train(model, optimizer)), torch.stack(expected))
    return same(whole(model), whole(reference))


def only_rank0(state: State) -> Any:
    return state if dist.get_rank() == 0 else None
