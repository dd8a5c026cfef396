"""Finds the process group of exactly the ranks that share a model. Local; its weights need no memory yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardow.base.checks import instance, invalid
from shardow.sharding.dtensor import modules_of, reshard
from shardow.sharding.fsdp1 import Fsdp1Adapter
from shardow.sharding.slots import slots
from shardow.sharding.zero3 import is_partitioned


def group_of_model(model: nn.Module, user_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Returns ``user_group``, or the group that the model's shards and replicas name; None: this process alone."""
    # Unsharded copies, which a forward without backward leaves in place, have no mesh.
    reshard(modules_of(model))
    return group_of_tensors(model, [slot.recorded for slot in slots(model)], user_group, Fsdp1Adapter(model))


def group_of_tensors(
    model: nn.Module, tensors: Sequence[torch.Tensor], user_group: dist.ProcessGroup | None, fsdp1: Fsdp1Adapter
) -> dist.ProcessGroup | None:
    """Returns the same of a model whose tensors are known."""
    groups = fsdp1.groups()
    groups += [module.process_group for module in model.modules() if isinstance(module, DistributedDataParallel)]
    groups += [tensor.ds_process_group for tensor in tensors if is_partitioned(tensor)]  # type: ignore[attr-defined]
    return choose_group(groups, meshes_of(tensors), user_group)


def meshes_of(tensors: Iterable[torch.Tensor]) -> list[DeviceMesh]:
    return list(dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)))


def choose_group(
    groups: Iterable[dist.ProcessGroup], meshes: Iterable[DeviceMesh], user_group: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """Returns ``user_group``, or a group of all ranks of ``groups`` and ``meshes``. Raises where there is none."""
    groups, meshes = [*dict.fromkeys(groups)], list(meshes)
    ranks = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
    ranks |= {int(rank) for mesh in meshes for rank in mesh.mesh.flatten()}
    if user_group is not None:
        instance("group", user_group, dist.ProcessGroup)
        outside = ranks - set(dist.get_process_group_ranks(user_group))
        if outside:
            raise invalid(f"the model is shared by ranks {sorted(ranks)}; group= lacks {sorted(outside)} of them")
        return user_group
    if len(ranks) < 2:
        return None
    if ranks == set(range(dist.get_world_size())):
        return dist.group.WORLD
    for group in groups + [mesh.get_group(0) for mesh in meshes if mesh.ndim == 1]:
        if set(dist.get_process_group_ranks(group)) == ranks:
            return group
    raise invalid(f"the model is shared by ranks {sorted(ranks)}, whose process group is not known; pass it as group=")
