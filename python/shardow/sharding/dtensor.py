"""Supports FSDP2, HSDP, TP and their nestings, where a parameter is a DTensor, and its placements say everything. After
a forward, FSDP2 may show unsharded parameters in place of the recorded ones, and its next forward may use these copies:
writing shards then would leave the model on old weights. So every FSDPModule is resharded before and after shards are
written; where the model is a part of another one, its parents are too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

# Private, since nothing public leads from a parameter to its module.
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardow import _core
from shardow.base.checks import unsupported, warn
from shardow.sharding.local import Replicas


def region_of(name: str, tensor: Any) -> _core.Region:
    """Returns the region of DTensor ``tensor`` on this rank, checked against its local tensor; ``name`` is for
    messages. The engine interprets the placements: its rule was compared with what ``fully_shard`` and
    ``distribute_tensor`` really cut; torch's own helper is wrong for uneven TP + ``fully_shard``."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is outside the tensor's mesh
        return _core.Region.whole(tensor.shape).window(0, 0)
    sizes = [(mesh.size(mesh_dim), place) for mesh_dim, place in enumerate(coordinate)]
    region = _core.region_of(name, tensor.shape, sizes, list(map(_placement, tensor.placements)))
    local_shape = tuple(tensor._local_tensor.shape)  # the public to_local() makes a view each time, with a grad_fn
    # An empty shard may be (0, 0) where (1, 0) is expected.
    if math.prod(local_shape) != region.size or (region.size and local_shape != region.grid_shape):
        elements = f"{list(local_shape)} here, {math.prod(local_shape)} elements"
        raise unsupported(f"'{name}' holds {elements}, where its placements {tensor.placements} say {region}")
    return region


def _placement(placement: Any) -> _core.Placement:
    if placement.is_replicate():
        return _core.Placement.replicate()
    if not hasattr(placement, "dim"):
        return _core.Placement.partial()
    return _core.Placement.shard(placement.dim, getattr(placement, "split_factor", 1))


def replicas_of(tensor: Any) -> Replicas:
    """Returns (process group, this rank's index, size) of each mesh dimension that only replicates."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    return tuple(
        (mesh.get_group(mesh_dim), coordinate[mesh_dim], mesh.size(mesh_dim))
        for mesh_dim, placement in enumerate(tensor.placements)
        if placement.is_replicate() and mesh.size(mesh_dim) > 1
    )


def sharded_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Returns a DTensor of this rank's ``local``, without planning an operation, for which torch takes milliseconds."""
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def empty_like(tensor: torch.Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor without values, in memory or on meta, of the shape and kind of a model's ``tensor``: a DTensor
    sharded alike, a Parameter with the attributes that its makers gave it."""
    if isinstance(tensor, DTensor):
        return sharded_like(tensor, empty_like(tensor._local_tensor, device, dtype))
    empty = torch.empty_like(tensor, device=device, dtype=dtype, requires_grad=False)
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = type(tensor)(empty, requires_grad=tensor.requires_grad)
    vars(parameter).update({key: value for key, value in vars(tensor).items() if not key.startswith("_")})
    return parameter


def modules_of(model: nn.Module) -> list[Any]:
    """Returns FSDP2's modules that show weights of ``model``: those in it, and those that contain it or one of its
    modules."""
    inside = {id(module): module for module in model.modules()}
    own = [module for module in inside.values() if isinstance(module, FSDPModule)]
    outside = [module for module in fsdp_modules() if id(module) not in inside]
    return own + [module for module in outside if any(id(child) in inside for child in module.modules())]


def reshard(modules: Iterable[Any]) -> None:
    """Frees the unsharded copies that FSDP2's ``modules`` show. Local. After a forward that raised, roots assume
    that it still runs, and ignore this: their iteration state is reset first. Gradients that wait for their reduction
    are lost with it, as torch documents."""
    modules = list(modules)
    for module in modules:  # not recursive: the root alone is not enough
        module.reshard()
    if not unsharded(modules):
        return
    for module in modules:
        state = module._get_fsdp_state()  # private: no public API shows roots and waiting gradients
        if state._is_root and hasattr(module, "reset_iter_state"):
            if any(_awaits_reduction(group) for member in state._state_ctx.all_states for group in _groups(member)):
                lost = "what was not yet reduced is dropped; begin the accumulation again"
                warn(f"a forward of this FSDP2 model raised while gradients accumulated: {lost}", RuntimeWarning)
            module.reset_iter_state()
    for module in modules:
        module.reshard()


def unsharded(modules: Iterable[Any]) -> list[str]:
    """Returns name and module class of each parameter that FSDP2's ``modules`` show unsharded now."""
    return [
        f"{info.param_name} of {type(info.module).__name__}"
        for p in parameters_of(modules)
        for info, whole in [(p._module_info, getattr(p, "_unsharded_param", None))]
        if whole is not None and info.module._parameters.get(info.param_name) is whole
    ]


def parameters_of(modules: Iterable[Any]) -> Iterator[Any]:
    """Yields FSDP2's record of each parameter, private: no public API tells unsharded from never sharded."""
    for module in modules:
        for group in _groups(module._get_fsdp_state()):
            yield from group.fsdp_params


def fsdp_modules() -> list[Any]:
    """Returns every FSDPModule that is alive."""
    return [module for module in list(_module_state_mapping) if isinstance(module, FSDPModule)]


def _groups(state: Any) -> list[Any]:
    """Returns the parameter groups of a module's state; before torch 2.12 it had at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [group for group in [state._fsdp_param_group] if group is not None]


def _awaits_reduction(group: Any) -> bool:
    waiting = (getattr(p, "unsharded_accumulated_grad", None) for p in getattr(group, "fsdp_params", ()))
    return getattr(group, "_partial_reduce_output", None) is not None or any(grad is not None for grad in waiting)
