"""FSDP2, HSDP, TP and their nestings: a parameter is a DTensor, and its placements say everything. After a forward,
FSDP2 may show unsharded parameters in place of the recorded ones, and its next forward may use that copy: writing
shards then would leave the model on old weights. So every FSDPModule is resharded before and after shards are written;
of a part of a model, its parents too."""

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
    messages. What placements mean is the engine's to say: its rule was compared with what ``fully_shard`` and
    ``distribute_tensor`` really cut; torch's own helper is wrong for uneven TP + ``fully_shard``."""
    mesh, me = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if me is None:  # this rank is outside the tensor's mesh
        return _core.Region.whole(tensor.shape).window(0, 0)
    sizes = [(mesh.size(mesh_dim), place) for mesh_dim, place in enumerate(me)]
    region = _core.region_of(name, tensor.shape, sizes, list(map(_placement, tensor.placements)))
    held = tuple(tensor._local_tensor.shape)  # the public to_local() makes a view each time, with a grad_fn
    # An empty shard may be (0, 0) where (1, 0) is expected.
    if math.prod(held) != region.size or (region.size and held != region.grid_shape):
        there = f"{list(held)} here, {math.prod(held)} elements"
        raise unsupported(f"'{name}' holds {there}, where its placements {tensor.placements} say {region}")
    return region


def _placement(placement: Any) -> _core.Placement:
    if placement.is_replicate():
        return _core.Placement.replicate()
    if not hasattr(placement, "dim"):
        return _core.Placement.partial()
    return _core.Placement.shard(placement.dim, getattr(placement, "split_factor", 1))


def replicas_of(tensor: Any) -> Replicas:
    """(process group, this rank's index, size) of each mesh dimension that only replicates."""
    mesh, me = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if me is None:
        return ()
    return tuple(
        (mesh.get_group(mesh_dim), me[mesh_dim], mesh.size(mesh_dim))
        for mesh_dim, placement in enumerate(tensor.placements)
        if placement.is_replicate() and mesh.size(mesh_dim) > 1
    )


def sharded_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor of this rank's ``local``; without torch's planning of an operation, which takes milliseconds."""
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def empty_like(tensor: torch.Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a model's tensor without values, in memory or on meta: of the same shape and kind, a DTensor sharded
    alike, a Parameter with the attributes that its makers gave it."""
    if isinstance(tensor, DTensor):
        return sharded_like(tensor, empty_like(tensor._local_tensor, device, dtype))
    empty = torch.empty_like(tensor, device=device, dtype=dtype, requires_grad=False)
    if not isinstance(tensor, nn.Parameter):
        return empty
    made = type(tensor)(empty, requires_grad=tensor.requires_grad)
    vars(made).update({key: value for key, value in vars(tensor).items() if not key.startswith("_")})
    return made


def modules_of(model: nn.Module) -> list[Any]:
    """Returns FSDP2's modules that show weights of ``model``: those in it, and those that it, or something in it, is a
    part of."""
    inside = {id(module): module for module in model.modules()}
    own = [module for module in inside.values() if isinstance(module, FSDPModule)]
    outside = [module for module in fsdp_modules() if id(module) not in inside]
    return own + [module for module in outside if any(id(one) in inside for one in module.modules())]


def reshard(modules: Iterable[Any]) -> None:
    """Frees the unsharded copies that FSDP2's ``modules`` show. Local. After a forward that raised, roots believe that
    it still runs, and ignore that: they are told that it has ended. Gradients that wait for their reduction are lost
    with it, as torch documents."""
    modules = list(modules)
    for module in modules:  # not recursive: the root alone is not enough
        module.reshard()
    if not unsharded(modules):
        return
    for module in modules:
        state = module._get_fsdp_state()  # private: nothing public tells a root, or that gradients wait
        if state._is_root and hasattr(module, "reset_iter_state"):
            if any(_awaits_reduction(group) for one in state._state_ctx.all_states for group in _groups(one)):
                lost = "what was not yet reduced is dropped; begin the accumulation again"
                warn(f"a forward of this FSDP2 model raised while gradients accumulated: {lost}", RuntimeWarning)
            module.reset_iter_state()
    for module in modules:
        module.reshard()


def unsharded(modules: Iterable[Any]) -> list[str]:
    """Returns the parameters that FSDP2's ``modules`` show unsharded now."""
    return [
        f"{info.param_name} of {type(info.module).__name__}"
        for p in parameters_of(modules)
        for info, whole in [(p._module_info, getattr(p, "_unsharded_param", None))]
        if whole is not None and info.module._parameters.get(info.param_name) is whole
    ]


def parameters_of(modules: Iterable[Any]) -> Iterator[Any]:
    """Yields what FSDP2 keeps of each parameter; private: nothing public tells unsharded from never sharded."""
    for module in modules:
        for group in _groups(module._get_fsdp_state()):
            yield from group.fsdp_params


def fsdp_modules() -> list[Any]:
    """Returns every FSDPModule alive."""
    return [module for module in list(_module_state_mapping) if isinstance(module, FSDPModule)]


def _groups(state: Any) -> list[Any]:
    """Before torch 2.12 there was one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [group for group in [state._fsdp_param_group] if group is not None]


def _awaits_reduction(group: Any) -> bool:
    waiting = (getattr(p, "unsharded_accumulated_grad", None) for p in getattr(group, "fsdp_params", ()))
    return getattr(group, "_partial_reduce_output", None) is not None or any(grad is not None for grad in waiting)
