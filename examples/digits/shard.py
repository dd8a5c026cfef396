"""Every way in which the ranks can share the model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .model import DiT


def wrap(model: DiT, how: str) -> torch.nn.Module:
    """``model`` shared among all ranks, one block after the other where the wrapper is applied to parts."""
    world = dist.get_world_size()
    if how == "fsdp1":
        return _fsdp1(model)
    if how == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if how == "plain":
        return model
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard") if how == "hsdp" else ("shard",)
    mesh = init_device_mesh(
        "cpu", (world // shards(how, world), shards(how, world)) if how == "hsdp" else (world,), mesh_dim_names=names
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shards(how: str, world: int) -> int:
    """Of each parameter, where ranks hold different ones; HSDP has two copies of the model on an even number of
    ranks."""
    return world // 2 if how == "hsdp" and world % 2 == 0 else world


def _fsdp1(model: DiT) -> torch.nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    def shard(module: torch.nn.Module) -> torch.nn.Module:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)

    for i, block in enumerate(model.blocks):
        model.blocks[i] = shard(block)
    return shard(model)


def average_gradients(model: torch.nn.Module, how: str) -> None:
    """What every wrapper does by itself, for a plain model."""
    if how == "plain" and dist.get_world_size() > 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def ema_group(how: str) -> dist.ProcessGroup | None:
    """A plain model does not tell that other ranks hold replicas of it."""
    return dist.group.WORLD if how == "plain" else None


def local(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter."""
    return parameter._local_tensor if hasattr(parameter, "_local_tensor") else parameter.detach()
