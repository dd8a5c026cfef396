"""The models of walks, shared among ranks in several ways, that take whatever values a whole model has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import walks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardow._gather import take
from shardow.torch.find import find


def whole(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """FSDP takes no numbers and no channels_last."""
    model = walks.model(name, dtype).to(memory_format=torch.contiguous_format)
    if name == "blocks":
        model.scale = nn.Parameter(torch.full((1,), 1.5, dtype=dtype))
    return model


def _parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in model.named_children() if any(True for _ in child.parameters())]


def _fsdp1(use_orig_params: bool, hybrid: bool = False) -> Callable[[nn.Module, int], nn.Module]:
    def wrap(model: nn.Module, world: int) -> nn.Module:
        options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
        if hybrid:
            options |= {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": init_device_mesh("cpu", (2, world // 2))}
        for name, child in _parts(model)[1:]:
            setattr(model, name, FullyShardedDataParallel(child, **options))
        return FullyShardedDataParallel(model, **options)

    return wrap


def _fsdp2(model: nn.Module, world: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world,))
    for _, child in _parts(model)[1:]:
        fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _hsdp(model: nn.Module, world: int) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))


KINDS: dict[str, Callable[[nn.Module, int], nn.Module]] = {
    "plain": lambda model, world: model,
    "ddp": lambda model, world: DistributedDataParallel(model),
    "fsdp1": _fsdp1(True),
    "fsdp1-flat": _fsdp1(False),
    "fsdp1-hybrid": _fsdp1(True, hybrid=True),
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
}


def kinds(world: int) -> tuple[str, ...]:
    """All that make sense: with one rank in each shard group torch turns hybrid FSDP1 into ranks that know nothing of each other."""
    return tuple(kind for kind in KINDS if kind != "fsdp1-hybrid" or world > 2)


def shared(kind: str, model: nn.Module, world: int) -> nn.Module:
    """A copy of ``model``, shared."""
    copied = copy.deepcopy(model)
    if kind == "fsdp1-flat":
        copied.requires_grad_(True)  # flat parameters are trained whole or not at all
    return KINDS[kind](copied, world)


def setter(model: nn.Module, wholes: nn.Module) -> Callable[[], None]:
    """A function that gives the shared model the values that the whole one has then."""
    values = dict(wholes.named_parameters())
    pairs = [(one.tensor.view(-1), one.region, values[one.name].detach()) for one in find(model).parameters]

    def follow() -> None:
        for memory, region, value in pairs:
            take(value, region, memory)

    return follow
