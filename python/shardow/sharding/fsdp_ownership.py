"""Parameters without their model. Which FSDP modules they belong to, so that nothing that reads or writes shards leaves
an unsharded copy behind. After a forward without a backward the root of an FSDP model keeps its weights unsharded, and
the next forward uses that copy: shards written meanwhile are not seen. FSDP2 then shows the unsharded parameters
too."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from shardow.sharding.dtensor import fsdp_modules, parameters_of, reshard
from shardow.sharding.fsdp1 import free_unsharded, shown_by, wrappers


def resharded(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters, shards in place of FSDP2's unsharded ones; the copies of their FSDP modules are freed. Local.
    Cheap where there is no FSDP; under FSDP1 it looks through Python's heap."""
    found = list(parameters)
    shards = _reshard_fsdp2(found)
    if any(hasattr(p, "_fsdp_flattened") for p in found):  # FSDP1's own mark
        wanted = set(map(id, found))
        for wrapper in wrappers():
            if not wanted.isdisjoint(shown_by([wrapper])):
                free_unsharded(wrapper._handle)
    return [shards.get(id(p), p) for p in found]


def has_fsdp(model: nn.Module) -> bool:
    return any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in model.modules())


def _reshard_fsdp2(found: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The shards of unsharded parameters, by id, of all modules that any of ``found`` is in, which are resharded."""
    wanted, shards, modules = set(map(id, found)), dict[int, torch.Tensor](), []
    for module in fsdp_modules():
        kept = [*parameters_of(one for one in module.modules() if isinstance(one, FSDPModule))]
        shown = {id(p._unsharded_param): p.sharded_param for p in kept if hasattr(p, "_unsharded_param")}
        if not wanted.isdisjoint({*shown, *(id(p.sharded_param) for p in kept)}):
            modules.append(module)
            shards |= shown
    reshard(modules)
    return shards
