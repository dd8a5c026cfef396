"""Models with awkward sizes, their weights all different and known, and every way to share any of them among ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Tied(nn.Module):
    """A head on the embedding's weight, a module under two names, and a submodule that is called ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.module = nn.Linear(5, 5)
        self.again = self.module
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.module(self.embed(tokens))))


def _mlp() -> nn.Module:
    """Rows 7, 5, 3, 1: uneven on 2 to 4 ranks, and empty on some."""
    return nn.Sequential(
        nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 5), nn.Linear(5, 3, bias=False), nn.Linear(3, 1)
    )


def _conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 2, 1))


def _frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "bfloat16": lambda: _mlp().to(torch.bfloat16),
    "conv": _conv,
    "transformer": lambda: nn.Sequential(nn.TransformerEncoderLayer(6, 2, 7, batch_first=True), nn.Linear(6, 3)),
    "tied": Tied,
    "frozen": _frozen,
}


def build(name: str) -> nn.Module:
    """Every parameter counts on from the one before it, so that a wrong element shows. bfloat16 counts to 256."""
    model, at = MODELS[name](), 0
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((torch.arange(at, at + p.numel()) % 251).view(p.shape))
            at += p.numel()
    return model


def _units(model: nn.Module) -> list[str]:
    """Children that are sharded on their own; ties would cross them, so a tied model is one unit."""
    every_other = [*model.named_children()][::2]
    return [name for name, child in every_other if [*child.parameters()] and not isinstance(model, Tied)]


def _fsdp1(strategy: ShardingStrategy, use_orig_params: bool) -> Callable[[nn.Module, int], nn.Module]:
    return models.fsdp1(strategy, use_orig_params, _units)


def _fsdp2(model: nn.Module, world: int, **options: Any) -> nn.Module:
    return models.fsdp2(model, world, _units, **options)


def _plan(model: nn.Module) -> dict[str, Any]:
    """Column and row, in turn, of every Linear in a row of them; other modules stay whole."""
    linears = [name for name, child in model.named_children() if isinstance(child, nn.Linear)]
    return {name: ColwiseParallel() if i % 2 == 0 else RowwiseParallel() for i, name in enumerate(linears)}


def _tp(model: nn.Module, world: int) -> nn.Module:
    return parallelize_module(model, init_device_mesh("cpu", (world,)), _plan(model))


def _tp_fsdp2(model: nn.Module, world: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], _plan(model))
    for name in _units(model):
        fully_shard(getattr(model, name), mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def _wrapped(around: Callable[[nn.Module, int], nn.Module]) -> Callable[[nn.Module, int], nn.Module]:
    """Checkpoint wrappers inside, torch.compile outside (not run: its wrapper renames)."""

    def apply(model: nn.Module, world: int) -> nn.Module:
        for name in _units(model):
            setattr(model, name, checkpoint_wrapper(getattr(model, name)))
        return torch.compile(around(model, world), backend="eager")

    return apply


def _mixed(model: nn.Module, world: int) -> nn.Module:
    """The first child under FSDP2, the second under DDP, the third under FSDP1, the others left alone."""
    for i, (name, child) in enumerate(list(model.named_children())):
        if i == 0:
            fully_shard(child, mesh=init_device_mesh("cpu", (world,)))
        elif i == 1:
            setattr(model, name, DistributedDataParallel(child))
        elif i == 2:
            setattr(model, name, FullyShardedDataParallel(child, device_id=torch.device("cpu"), use_orig_params=True))
    return model


PARALLEL: dict[str, Callable[[nn.Module, int], nn.Module]] = {
    "plain": lambda model, world: model,
    "ddp": lambda model, world: DistributedDataParallel(model),
    "fsdp1": _fsdp1(ShardingStrategy.FULL_SHARD, True),
    "fsdp1-flat": _fsdp1(ShardingStrategy.FULL_SHARD, False),
    "fsdp1-grad-op": _fsdp1(ShardingStrategy.SHARD_GRAD_OP, True),
    "fsdp1-grad-op-flat": _fsdp1(ShardingStrategy.SHARD_GRAD_OP, False),
    "fsdp1-no-shard": _fsdp1(ShardingStrategy.NO_SHARD, True),
    "fsdp1-no-shard-flat": _fsdp1(ShardingStrategy.NO_SHARD, False),
    "fsdp1-hybrid": _fsdp1(ShardingStrategy.HYBRID_SHARD, True),
    "fsdp1-hybrid-flat": _fsdp1(ShardingStrategy.HYBRID_SHARD, False),
    "fsdp1-hybrid-zero2": _fsdp1(ShardingStrategy._HYBRID_SHARD_ZERO2, True),
    "fsdp2": _fsdp2,
    "fsdp2-always": lambda model, world: _fsdp2(model, world, reshard_after_forward=True),
    "fsdp2-never": lambda model, world: _fsdp2(model, world, reshard_after_forward=False),
    "fsdp2-partly": lambda model, world: _fsdp2(model, world, reshard_after_forward=2),
    "hsdp": lambda model, world: models.hsdp(model, world, _units),
    "tp": _tp,
    "tp+fsdp2": _tp_fsdp2,
    "mixed": _mixed,
    "wrapped-ddp": _wrapped(lambda model, world: DistributedDataParallel(model)),
    "wrapped-fsdp1": _wrapped(_fsdp1(ShardingStrategy.FULL_SHARD, True)),
    "wrapped-fsdp2": _wrapped(_fsdp2),
}


def models_for(kind: str) -> list[str]:
    """Ties don't survive being sharded apart, and tensor parallelism needs Linears."""
    unfit = {"mixed": {"tied"}, "tp": {"tied", "conv"}, "tp+fsdp2": {"tied", "conv"}}
    return [name for name in MODELS if name not in unfit.get(kind, ())]
