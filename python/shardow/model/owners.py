"""Parameters without their model. Which FSDP modules they belong to, so that nothing that reads or writes shards leaves
an unsharded copy behind. After a forward without a backward the root of an FSDP model keeps its weights unsharded, and
the next forward uses that copy: shards written meanwhile are not seen. FSDP2 then shows the unsharded parameters
too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from shardow.model.dtensor import DTensorAdapter, fsdp_modules
from shardow.model.fsdp1 import free_unsharded, wrappers


def resharded(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters, shards in place of FSDP2's unsharded ones; the copies of their FSDP modules are freed. Local.
    Cheap where there is no FSDP; under FSDP1 it looks through Python's heap."""
    found = list(parameters)
    shards = _reshard_fsdp2(found)
    if any(hasattr(p, "_fsdp_flattened") for p in found):  # FSDP1's own mark
        wanted = set(map(id, found))
        for handle in (one._handle for one in wrappers()):
            if not wanted.isdisjoint(map(id, (handle.flat_param, *(handle.flat_param._params or ())))):
                free_unsharded(handle)
    return [shards.get(id(p), p) for p in found]


def has_fsdp(model: nn.Module) -> bool:
    return any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in model.modules())


def _reshard_fsdp2(found: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The shards of unsharded parameters, by id. Other models that are unsharded now are resharded too, which costs
    them a gathering.
    """
    wanted = set(map(id, found))
    modules: list[tuple[Any, dict[str, torch.Tensor]]] = []
    for module in fsdp_modules():
        shown = _shown(module)
        if any(id(p) in wanted or not isinstance(p, DTensor) for p in shown.values()):
            module.reshard()
            modules.append((module, shown))
    if not modules:
        return {}
    now = {id(p) for module, _ in modules for p in _shown(module).values()}
    if any(isinstance(p, DTensor) and id(p) not in now for p in found):
        for module, shown in modules:
            if any(
                p is after and not isinstance(p, DTensor)
                for p, after in zip(shown.values(), _shown(module).values(), strict=True)
            ):
                DTensorAdapter(module).reset()  # after a forward that raised, reshard() did nothing
    return {
        id(p): after
        for module, shown in modules
        for p, after in zip(shown.values(), _shown(module).values(), strict=True)
    }


def _shown(module: Any) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters(remove_duplicate=False))
