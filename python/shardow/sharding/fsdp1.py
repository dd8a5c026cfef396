"""Supports FSDP1, where each rank holds a padded range of a flat parameter, and torch's infos say which elements of
which parameter lie where.

All of it is private to torch (``_handle``, ``_shard_param_infos``, ``_local_shard``): FSDP1 is in maintenance, and no
public API tells a shard's range. After a forward under no_grad the root keeps an unsharded copy that the next forward
uses, and its parameters do not show this: handles are resharded before and after shards are written.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from shardow import _core
from shardow.base.checks import invalid, unsupported
from shardow.sharding.local import Adapter, LocalTensor, replicas_in
from shardow.sharding.names import join, walk
from shardow.sharding.slots import slots

_WRITE = "write in place, p.data.copy_(...), or inside FullyShardedDataParallel.summon_full_params()"


def shard_of(handle: Any) -> torch.Tensor:
    """Returns this rank's range of a flat parameter: before the first forward flat_param itself, after it _local_shard,
    the same memory.
    """
    flat = handle.flat_param
    shard: torch.Tensor = getattr(flat, "_local_shard", flat.data) if handle.uses_sharded_strategy else flat.data
    return shard.detach()


def free_unsharded(handle: Any, name: Callable[[int], str] | None = None) -> None:
    """Frees the unsharded copy of a flat parameter, if there is one. Raises where that would lose values that FSDP has
    not taken over yet; ``name`` returns the name of the parameter with an index."""
    refuse_strays(handle, name or handle.flat_param._fqns.__getitem__)
    # Before the first forward reshard() would raise.
    if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_local_shard"):
        handle.reshard(True)
        handle.post_reshard()


def displaced(handle: Any) -> bool:
    """Returns whether the flat parameter is sharded, but not in the shard that FSDP uses after its next forward."""
    flat = handle.flat_param
    return hasattr(flat, "_local_shard") and handle.is_sharded(flat) and flat.data_ptr() != flat._local_shard.data_ptr()


def refuse_strays(handle: Any, name: Callable[[int], str]) -> None:
    """Raises for weights that are not where FSDP keeps them, and would be lost: original parameters that are neither in
    the shard nor in its unsharded copy. FSDP takes them over in its next forward, or forgets them if it makes its views
    anew before that.
    """
    flat = handle.flat_param
    if displaced(handle) and not torch.equal(flat.detach(), flat._local_shard.to(flat.dtype)):
        raise invalid(
            f"the flat parameter of '{name(0)}' was put elsewhere after its first forward, with other values: FSDP1 "
            "goes back to its own "
            f"shard. Put these back into flat_param._local_shard; move models before their first forward, and {_WRITE}"
        )
    memory = {tensor.untyped_storage().data_ptr() for tensor in (shard_of(handle), flat)}
    for i, (param, owner) in enumerate(zip(flat._params or (), flat._param_infos, strict=False)):
        shown = owner.module._parameters.get(owner.param_name)
        if not isinstance(shown, nn.Parameter) or (
            handle.uses_sharded_strategy and not flat._shard_param_infos[i].in_shard
        ):
            continue  # inside of a forward, or this rank holds nothing of it
        if shown is not param or (
            type(shown) is nn.Parameter and shown.numel() and shown.untyped_storage().data_ptr() not in memory
        ):
            raise invalid(
                f"parameter '{name(i)}' was put elsewhere (p.data = ..., or another Parameter in its place), which "
                "FSDP1 takes over in its next forward: until then its shard holds the values from before. Run a "
                f"forward first; or {_WRITE}"
            )


class Fsdp1Adapter(Adapter):
    def __init__(self, model: nn.Module) -> None:
        self._wrappers = _wrappers_of(model)
        names = defaultdict(list)
        for name, module in walk(model) if self._wrappers else ():
            names[id(module)].append(name)
        #: Local tensors by the id of a flat parameter and the number of a parameter in it.
        self._places = {place: local for module in self._wrappers for place, local in _flat_tensors(module, names)}
        self.hidden = [*self._places.values()]
        self.owned = shown_by(self._wrappers)

    def groups(self) -> list[dist.ProcessGroup]:
        """Returns the groups of the ranks that share flat parameters. Hybrid sharding is a product of two groups, and a
        rank knows its own row and column alone: WORLD where the product has all ranks."""
        groups, world = list[dist.ProcessGroup](), dist.group.WORLD
        for module in self._wrappers:
            columns = getattr(module, "_inter_node_pg", None)
            size = dist.get_world_size(module.process_group) * (dist.get_world_size(columns) if columns else 1)
            groups.append(world if world and size == world.size() else module.process_group)
        return groups

    def shards(self) -> list[torch.Tensor]:
        return [shard_of(module._handle) for module in self._wrappers]

    def flat_parameters(self) -> list[torch.Tensor]:
        return [module._handle.flat_param for module in self._wrappers]

    def shown(self) -> list[torch.Tensor]:
        """Returns the original parameters that have this rank's part in the shard."""
        return [local.shown for local in self.hidden if type(local.shown) is nn.Parameter]

    def written(self) -> None:
        torch.autograd.graph.increment_version(self.flat_parameters())

    def in_place(self) -> bool:
        return not any(displaced(module._handle) for module in self._wrappers)

    def reshard(self, refuse_written: bool = False) -> None:
        for module in self._wrappers:
            free_unsharded(module._handle, partial(self._name, module._handle.flat_param))

    def _name(self, flat: Any, index: int) -> str:
        local = self._places.get((id(flat), index))
        return str(flat._fqns[index]) if local is None else local.name


def _wrappers_of(model: nn.Module) -> list[Any]:
    """Returns the FSDP1 wrappers whose flat parameters hold weights of the model's modules: those in it, and those that
    contain it. FSDP1 has no registry of wrappers. All of Python's objects are searched for them where a module bears
    FSDP's mark, and no FSDP module of the model contains it.
    """
    modules = {id(module): module for module in model.modules()}
    holders: list[Any] = [
        module
        for module in modules.values()
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None
    ]
    tops = [module for module in modules.values() if isinstance(module, (FSDPModule, FullyShardedDataParallel))]
    below = {id(module) for top in tops for module in top.modules()}
    if all(key in below or "_is_fsdp_managed_module" not in vars(module) for key, module in modules.items()):
        return holders
    for wrapper in wrappers():
        flat = wrapper._handle.flat_param
        infos = [*flat._param_infos, *flat._shared_param_infos]
        if id(wrapper) not in modules and any(id(info.module) in modules for info in infos):
            holders.append(wrapper)
    reached = shown_by(holders)
    marked = [slot for slot in slots(model, "parameter") if hasattr(slot.recorded, "_fsdp_flattened")]
    if lost := [f"{slot.key} of {type(slot.module).__name__}" for slot in marked if id(slot.recorded) not in reached]:
        why = "this is a part of an FSDP1 model that is gone, so nothing tells which elements it holds"
        raise unsupported(f"{', '.join(lost[:8])}: {why}; pass the whole model, or keep it alive")
    return holders


def wrappers() -> Iterator[Any]:
    """Yields every FSDP1 wrapper that is alive and has a flat parameter."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), FullyShardedDataParallel) and candidate.__dict__.get("_handle") is not None:
            yield candidate


def shown_by(wrappers: Sequence[Any]) -> set[int]:
    """Returns the ids of the parameters, flat and original, that show the wrappers' weights."""
    return {
        id(p) for module in wrappers for p in (module._handle.flat_param, *(module._handle.flat_param._params or ()))
    }


def _flat_tensors(module: Any, names: Mapping[int, list[str]]) -> Iterator[tuple[tuple[int, int], LocalTensor]]:
    """Yields the parameters in the module's flat parameter, each with the flat parameter's id and an index. ``names``:
    the clean names of each module, by id; parameters of other modules are left out."""
    handle = module._handle
    flat, sharded = handle.flat_param, handle.uses_sharded_strategy
    shown = list(flat._params) if flat._params is not None else [flat] * len(flat._fqns)
    replicas = replicas_in(getattr(module, "_inter_node_pg", None) if sharded else module.process_group)
    for i, (owner, shape, info) in enumerate(
        zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True)
    ):
        if not (clean_names := _names(owner, flat, names)):
            continue
        name, *aliases = clean_names
        begin, count, offset = 0, 0, 0
        if info.in_shard:
            begin, count, offset = info.intra_param_start_idx, info.numel_in_shard, info.offset_in_shard
        region = _core.Region.whole(list(shape)).window(begin, begin + count)
        span = slice(offset, offset + count)
        memory, within = partial(_in_shard, handle, span), span if shown[i] is flat else slice(count)
        local = LocalTensor(name, memory(), region, shown[i], replicas, True, tuple(aliases), memory, within)
        yield (id(flat), i), local


def _in_shard(handle: Any, span: slice) -> torch.Tensor:
    return shard_of(handle)[span]


def _names(owner: Any, flat: Any, names: Mapping[int, list[str]]) -> list[str]:
    """Returns every clean name of a parameter: one for each place of its module in the model, and those of the
    parameters that are tied to it.
    """
    infos = [owner]
    infos += [
        info
        for info in flat._shared_param_infos
        if info.prim_module is owner.module and info.prim_param_name == owner.param_name
    ]
    return list(dict.fromkeys(join(name, info.param_name) for info in infos for name in names.get(id(info.module), ())))
