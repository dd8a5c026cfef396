"""FSDP1: flat parameters, of which each rank holds a padded stretch; infos beside them say which elements of which parameter lie where.

All of it is private to torch (``_handle``, ``_shard_param_infos``, ``_local_shard``): FSDP1 is in maintenance, and nothing public tells a shard's range.
After a forward under no_grad the root keeps an unsharded copy that the next forward uses, and nothing in its parameters shows it: handles are resharded before and after shards are written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from shardow import _core
from shardow.torch.local import LocalTensor, Replicas, Slot
from shardow.torch.names import join, walk
from shardow.torch.parents import fsdp1_around, owners


@dataclass(eq=False)
class FlatTensor(LocalTensor):
    """A parameter inside a flat shard: ``offset`` elements from its start. ``shown``: the parameter that has the gradient, of its own or of the whole flat one."""

    handle: Any = None
    offset: int = 0
    shown: Any = None

    def memory(self) -> torch.Tensor:
        return shard_of(self.handle)[self.offset : self.offset + self.region.size]


def shard_of(handle: Any) -> torch.Tensor:
    """This rank's stretch of a flat parameter: before the first forward flat_param itself, after it _local_shard, the same memory."""
    flat = handle.flat_param
    shard: torch.Tensor = getattr(flat, "_local_shard", flat.data) if handle.uses_sharded_strategy else flat.data
    return shard.detach()


def free_unsharded(handle: Any) -> None:
    """The unsharded copy of a flat parameter, if there is one."""
    if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_local_shard"):  # before the first forward reshard() would raise
        handle.reshard(True)
        handle.post_reshard()


class Fsdp1Adapter:
    def __init__(self, model: nn.Module) -> None:
        names: dict[int, list[str]] = {}
        wrappers: dict[int, Any] = {}
        for name, module in walk(model):
            names.setdefault(id(module), []).append(name)
            if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
                wrappers[id(module)] = module
        inside = list(wrappers.values())
        owned = {key for module in inside for key in owners(module._handle.flat_param)}
        self._wrappers = inside + fsdp1_around(model, owned, _parameters_of(inside))
        self._locals = [local for module in self._wrappers for local in _flat_tensors(module, names)]
        self._owned = _parameters_of(self._wrappers)

    def claims(self, slot: Slot) -> bool:
        return id(slot.recorded) in self._owned

    def local(self, slot: Slot) -> None:
        return None

    def memory(self, slot: Slot) -> torch.Tensor:
        raise AssertionError("FSDP1's memory is found through its handles")

    def others(self) -> Sequence[FlatTensor]:
        return self._locals

    def groups(self) -> list[dist.ProcessGroup]:
        return [module.process_group for module in self._wrappers]

    def spans_world(self) -> bool:
        """Hybrid sharding is a product of two groups, of which each rank knows its own row and column only."""
        world = dist.get_world_size() if self._wrappers else 0
        rows = (
            dist.get_world_size(module.process_group) * math.prod(size for _, _, size in _replicas(module)) for module in self._wrappers
        )
        return any(size == world for size in rows)

    def shards(self) -> list[torch.Tensor]:
        """One per flat parameter: their addresses show whether anything moved."""
        return [shard_of(module._handle) for module in self._wrappers]

    def flat_parameters(self) -> list[torch.Tensor]:
        return [module._handle.flat_param for module in self._wrappers]

    def reshard(self) -> None:
        for module in self._wrappers:
            free_unsharded(module._handle)


def _parameters_of(wrappers: Sequence[Any]) -> set[int]:
    """Ids of what modules show of the wrappers' weights."""
    return {id(p) for module in wrappers for p in (module._handle.flat_param, *(module._handle.flat_param._params or ()))}


def _flat_tensors(module: Any, names: dict[int, list[str]]) -> Iterator[FlatTensor]:
    """``names``: the clean names of each module, by id; what lies in other modules is left out."""
    handle = module._handle
    flat, whole = handle.flat_param, not handle.uses_sharded_strategy
    shown = list(flat._params) if flat._params is not None else [flat] * len(flat._fqns)
    replicas, offsets = _replicas(module), _offsets(flat)
    for i, (owner, shape, info) in enumerate(zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True)):
        called = _names(owner, flat, names)
        if not called:
            continue
        begin, count, offset = 0, 0, 0
        if whole:
            begin, count, offset = 0, shape.numel(), offsets[i]
        elif info.in_shard:
            begin, count, offset = info.intra_param_start_idx, info.numel_in_shard, info.offset_in_shard
        region = _core.Region.whole(list(shape)).window(begin, begin + count)
        memory = shard_of(handle)[offset : offset + count]
        yield FlatTensor(called[0], memory, region, shown[i].requires_grad, replicas, True, tuple(called[1:]), handle, offset, shown[i])


def _names(owner: Any, flat: Any, names: dict[int, list[str]]) -> list[str]:
    """Every clean name of a parameter: of each place where its module stands, and of the parameters that are tied to it."""
    tied = [info for info in flat._shared_param_infos if info.prim_module is owner.module and info.prim_param_name == owner.param_name]
    return list(dict.fromkeys(join(name, one.param_name) for one in (owner, *tied) for name in names.get(id(one.module), ())))


def _offsets(flat: Any) -> list[int]:
    """Where each parameter begins in an unsharded flat parameter: alignment padding may lie between."""
    offsets, at = [], 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            offsets.append(at)
        at += numel
    return offsets


def _replicas(module: Any) -> Replicas:
    group = getattr(module, "_inter_node_pg", None) if module._handle.uses_sharded_strategy else module.process_group
    if group is None or dist.get_world_size(group) == 1:
        return ()
    return ((group, dist.get_rank(group), dist.get_world_size(group)),)
