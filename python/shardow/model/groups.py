"""The process group of exactly the ranks that share a model. Local, and known before its weights have memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardow.base.checks import instance, invalid
from shardow.model import zero3
from shardow.model.dtensor import modules_of, reshard
from shardow.model.fsdp1 import Fsdp1Adapter
from shardow.model.slots import slots


def group_of_model(model: nn.Module, given: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """``given``, or the group that the model's shards and replicas tell of; None: this process alone."""
    # Unsharded copies, which a forward without backward leaves in place, have no mesh.
    reshard(modules_of(model))
    return group_of_tensors(model, [slot.recorded for slot in slots(model)], given, Fsdp1Adapter(model))


def group_of_tensors(
    model: nn.Module, tensors: Sequence[torch.Tensor], given: dist.ProcessGroup | None, fsdp1: Fsdp1Adapter
) -> dist.ProcessGroup | None:
    """The same of a model whose tensors are known."""
    groups = fsdp1.groups() + [
        module.process_group for module in model.modules() if isinstance(module, DistributedDataParallel)
    ]
    return choose_group([*groups, *zero3.groups_of(tensors)], meshes_of(tensors), given, fsdp1.spans_world())


def meshes_of(tensors: Iterable[torch.Tensor]) -> list[DeviceMesh]:
    return list(dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)))


def choose_group(
    groups: Iterable[dist.ProcessGroup],
    meshes: Iterable[DeviceMesh],
    given: dist.ProcessGroup | None,
    world: bool = False,
) -> dist.ProcessGroup | None:
    """``given``, or a group of all ranks of ``groups`` and ``meshes``; ``world``: it is known to be everybody. Raises
    where there is none."""
    groups, meshes = list(groups), list(meshes)
    ranks = {rank for group in {id(g): g for g in groups}.values() for rank in dist.get_process_group_ranks(group)}
    ranks |= {int(rank) for mesh in meshes for rank in mesh.mesh.flatten()}
    if given is not None:
        instance("group", given, dist.ProcessGroup)
        outside = ranks - set(dist.get_process_group_ranks(given))
        if outside:
            raise invalid(f"the model is shared by ranks {sorted(ranks)}; group= lacks {sorted(outside)} of them")
        return given
    if len(ranks) < 2:
        return None
    if world or ranks == set(range(dist.get_world_size())):
        return dist.group.WORLD
    for group in groups + [mesh.get_group(0) for mesh in meshes if mesh.ndim == 1]:
        if set(dist.get_process_group_ranks(group)) == ranks:
            return group
    raise invalid(f"the model is shared by ranks {sorted(ranks)}, whose process group is not known; pass it as group=")
