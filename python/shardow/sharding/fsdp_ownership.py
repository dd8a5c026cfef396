"""Finds the FSDP modules of parameters that come without their model, so that reading or writing shards leaves no
unsharded copy behind. After a forward without a backward the root of an FSDP model keeps its weights unsharded, and the
next forward uses that copy: shards written meanwhile have no effect. FSDP2 then shows the unsharded parameters too."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from shardow.sharding.dtensor import fsdp_modules, parameters_of, reshard
from shardow.sharding.fsdp1 import free_unsharded, shown_by, wrappers


def resharded(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the parameters, with shards in place of FSDP2's unsharded ones. Frees the copies of their FSDP modules.
    Local. Cheap where there is no FSDP; under FSDP1 it searches Python's heap."""
    parameters = list(parameters)
    shards = _reshard_fsdp2(parameters)
    if any(hasattr(p, "_fsdp_flattened") for p in parameters):  # FSDP1's own mark
        wanted = set(map(id, parameters))
        for wrapper in wrappers():
            if not wanted.isdisjoint(shown_by([wrapper])):
                free_unsharded(wrapper._handle)
    return [shards.get(id(p), p) for p in parameters]


def has_fsdp(model: nn.Module) -> bool:
    return any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in model.modules())


def _reshard_fsdp2(parameters: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Reshards all modules that any of ``parameters`` is in. Returns the shards of their unsharded parameters by id."""
    wanted, shards, modules = set(map(id, parameters)), dict[int, torch.Tensor](), []
    for module in fsdp_modules():
        kept = [*parameters_of(child for child in module.modules() if isinstance(child, FSDPModule))]
        shown = {id(p._unsharded_param): p.sharded_param for p in kept if hasattr(p, "_unsharded_param")}
        if not wanted.isdisjoint({*shown, *(id(p.sharded_param) for p in kept)}):
            modules.append(module)
            shards |= shown
    reshard(modules)
    return shards
