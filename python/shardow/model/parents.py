"""A part of a sharded model: the FSDP modules outside of it that hold its weights, since nothing in the part itself
tells of them. Who averages a part must reshard its parents: an unsharded copy that a forward leaves behind hides
FSDP2's shards, and is what the next forward uses."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# Private, since nothing public leads from a parameter to its module.
from torch.distributed._composable_state import (
    _module_state_mapping,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from shardow.base.checks import unsupported
from shardow.model.names import modules_of
from shardow.model.slots import slots


def fsdp2_around(model: nn.Module) -> list[Any]:
    """FSDP modules that ``model``, or something in it, is a part of."""
    known = [module for module in list(_module_state_mapping) if isinstance(module, FSDPModule)]
    if not known:
        return []
    inside = set(map(id, modules_of(model)))
    outside = [module for module in known if id(module) not in inside]
    return [module for module in outside if any(id(one) in inside for one in module.modules())]


def fsdp1_around(model: nn.Module, owned: set[int], known: set[int]) -> list[Any]:
    """FSDP1 wrappers outside of ``model`` whose flat parameters hold weights of its modules. ``owned``: ids of the
    modules whose weights the wrappers inside hold; ``known``: of those parameters. FSDP1 registers its wrappers
    nowhere, so they are looked for among all of Python's objects, where a parameter bears FSDP1's mark or a module has
    a tensor in a parameter's place."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    modules = {id(module): module for module in model.modules()}
    marked = [
        slot
        for slot in slots(model, "parameter")
        if id(slot.recorded) not in known and hasattr(slot.recorded, "_fsdp_flattened")
    ]
    if not marked and not any(key not in owned and _has_bare_tensor(module) for key, module in modules.items()):
        return []
    found = [
        one for one in wrappers() if id(one) not in modules and not owners(one._handle.flat_param).isdisjoint(modules)
    ]
    reached = {id(p) for one in found for p in (one._handle.flat_param, *(one._handle.flat_param._params or ()))}
    if any(id(slot.recorded) not in reached for slot in marked):
        some = ", ".join(f"{slot.key} of {type(slot.module).__name__}" for slot in marked[:8])
        why = "this is a part of an FSDP1 model that is gone, so nothing tells which elements it holds"
        raise unsupported(f"{some}: {why}; pass the whole model, or keep it alive")
    return found


def owners(flat: Any) -> set[int]:
    """Ids of the modules whose parameters lie in a flat parameter, by whatever name."""
    tied = [one for info in flat._shared_param_infos for one in (info.module, info.prim_module)]
    return {id(one) for one in [*(info.module for info in flat._param_infos), *tied]}


def wrappers() -> Iterator[Any]:
    """Every FSDP1 wrapper alive that has weights of its own."""
    for one in gc.get_objects():
        if issubclass(type(one), FullyShardedDataParallel) and one.__dict__.get("_handle") is not None:
            yield one


def _has_bare_tensor(module: nn.Module) -> bool:
    return any(isinstance(value, torch.Tensor) for value in module.__dict__.values())
