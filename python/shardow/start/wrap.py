"""wrap(): shards a model with FSDP2, layer by layer. No rank holds more than its own shards, beside where the weights
come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shardow.base.checks import instance, invalid, seconds
from shardow.distributed.rank_group import RankGroup, Step, equal_facts
from shardow.errors import Error
from shardow.sharding import parameter_registry
from shardow.sharding.dtensor import empty_like
from shardow.sharding.groups import choose_group, meshes_of
from shardow.sharding.modules import is_container, repeated_blocks
from shardow.sharding.names import walk
from shardow.sharding.slots import by_tensor, slots
from shardow.start.materialize import Source, common_kind, materialize

Units = Iterable[type[nn.Module] | str] | Callable[[str, nn.Module], bool] | None


def wrap(
    model: nn.Module, mesh: DeviceMesh, optimizer: torch.optim.Optimizer | None = None, units: Units = None, *,
    source: Source = None, memory_efficient_init: bool = True, reshard_after_forward: bool = True,
    mixed_precision: MixedPrecisionPolicy | torch.dtype | None = None, strict: bool = True,
    group: dist.ProcessGroup | None = None, timeout: float | timedelta | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer | None]:  # fmt: skip
    """fully_shard() on every unit and on the model, and its weights, in one call. Collective over the mesh.

    Args:
        model: with weights on rank 0 at least, or on meta with a ``source``.
        mesh: of one dimension (FSDP2), or two (HSDP). What is sharded already, as experts on a mesh of their own, stays
            as it is.
        optimizer: made from the model's parameters; its groups, their options and its state are kept, its parameters
            become the sharded ones.
        units: what is sharded by itself: classes or their names, or a predicate of (name, module); by default the
            modules of every ModuleList and Sequential that holds several of one class; nothing, as in ``units=()``: the
            model alone.
        source: as in materialize(); by default the weights that the model has on rank 0, from which every rank is sent
            its slices.
        memory_efficient_init: False: every rank has the whole model in memory, and shards it where it is.
        reshard_after_forward: as fully_shard().
        mixed_precision: torch's policy, or the dtype of parameters in forward and backward; gradients are reduced in
            float32 then.
        strict, timeout: as in materialize().
        group: the mesh's ranks, where torch knows no group of them.

    Returns:
        (model, optimizer), the same objects.

    Raises:
        ValueError: no such unit, a model on meta without a source, while the model is whole. Else as materialize(), and
            the model has no weights then, nor has the optimizer, which ``materialize(..., optimizer=)`` binds again.
    """
    instance("wrap(): model", model, nn.Module)
    instance("wrap(): mesh", mesh, DeviceMesh)
    meshes = [mesh, *meshes_of(slot.recorded for slot in slots(model))]
    ranks = RankGroup(choose_group([], meshes, group), seconds(timeout))
    from_memory = source is None and memory_efficient_init
    has_weights = source is None and (ranks.rank == 0 or not memory_efficient_init)

    def prepare() -> Step[tuple[list[nn.Module], parameter_registry.Bindings | None, Any]]:
        checked = _checked(model, mesh, units, optimizer, has_weights)
        shapes = {slot.name: f"{slot.recorded.dtype} {list(slot.recorded.shape)}" for slot in slots(model, "parameter")}
        shared_out = [name for name, module in walk(model) if module in checked[0]]
        facts = {"tensors": shapes, "units": shared_out, "memory_efficient_init": memory_efficient_init}
        return Step(checked, [common_kind("wrap()", source), equal_facts("wrap()", facts, ranks)])

    chosen, bindings, own = ranks.step("wrap()", prepare)
    if from_memory:
        to_meta(model)
        if optimizer is not None and bindings is not None:
            parameter_registry.bind(optimizer, bindings)  # it would keep the whole model
    if isinstance(mixed_precision, torch.dtype):
        mixed_precision = MixedPrecisionPolicy(param_dtype=mixed_precision, reduce_dtype=torch.float32)
    policy = mixed_precision or MixedPrecisionPolicy()
    shard = partial(fully_shard, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    ranks.agree("wrap()", lambda: _shard([*chosen, model], shard))
    if from_memory or source is not None:
        try:
            materialize(model, own if from_memory else source, optimizer, strict=strict, group=group, timeout=timeout)
        except Error as error:
            error.message += (
                "; the model is sharded now, and has no weights: materialize() brings them" if from_memory else ""
            )
            raise
    elif optimizer is not None and bindings is not None:
        parameter_registry.bind(optimizer, bindings)
    parameter_registry.forget_swapped(model)
    return model, optimizer


def _shard(units: list[nn.Module], shard: Callable[[nn.Module], object]) -> None:
    for unit in units:
        try:
            shard(unit)
        except Exception as error:
            way_out = "build the model anew, its weights are gone"
            raise invalid(f"wrap(): fully_shard() of a {type(unit).__name__}: {error}; {way_out}") from error


def _checked(
    model: nn.Module, mesh: DeviceMesh, units: Units, optimizer: torch.optim.Optimizer | None, has_weights: bool
) -> tuple[list[nn.Module], parameter_registry.Bindings | None, Mapping[str, torch.Tensor] | None]:
    """Units, where the optimizer's parameters are, and the weights that this rank gives; raises while the model is
    whole.
    """
    if isinstance(model, FSDPModule):
        raise invalid("wrap(): the model is sharded already; materialize() brings weights")
    if mesh.ndim > 2 or (mesh.ndim == 2 and mesh.mesh_dim_names is None):
        raise invalid(
            f"wrap(): the mesh has {mesh.ndim} dimensions named {mesh.mesh_dim_names}; FSDP2 takes one, or two with "
            "names (HSDP)"
        )
    chosen = _chosen(model, units)
    for unit in [*chosen, model]:
        if is_container(unit):
            raise invalid(f"wrap(): a {type(unit).__name__} has no forward(), and is no unit; name its members' class")
    _check_ties(model, chosen)
    parameter_registry.remember_all(model)
    bindings = None if optimizer is None else parameter_registry.bindings(optimizer, model)
    return chosen, bindings, own_weights(model) if has_weights else None


def _chosen(model: nn.Module, units: Units) -> list[nn.Module]:
    if units is None:
        return [module for module in repeated_blocks(model) if not isinstance(module, FSDPModule)]
    below = [(name, module) for name, module in walk(model) if module is not model]
    if callable(units):
        found = [module for name, module in below if units(name, module)]
    elif known := {unit if isinstance(unit, str) else unit.__name__ for unit in units}:
        found = [module for _, module in below if any(cls.__name__ in known for cls in type(module).__mro__)]
    else:
        return []
    if not found:
        raise invalid(f"wrap(): no module of the model is one of units={units!r}")
    inner_first = dict.fromkeys(reversed(found))  # as torch wants
    return [module for module in inner_first if not isinstance(module, FSDPModule)]


def _check_ties(model: nn.Module, chosen: list[nn.Module]) -> None:
    """FSDP2 would give a weight that two of its groups share to each of them, and they would train apart."""
    ids = set(map(id, chosen))
    units = {name: id(module) for name, module in walk(model) if id(module) in ids}

    def unit_of(name: str) -> int | None:
        while name and name not in units:
            name = name.rpartition(".")[0]
        return units.get(name)

    for first, *others in by_tensor(slots(model, "parameter")).values():
        for slot in others:
            if unit_of(slot.name) != unit_of(first.name):
                tied = f"'{slot.name}' is the same tensor as '{first.name}'"
                raise invalid(f"wrap(): {tied}, in another unit; leave one of the two modules out of units=")


def own_weights(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """What is sharded already stays where it is."""
    state = {
        name: tensor.detach()
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor)
    }
    on_meta = [name for name, tensor in state.items() if tensor.is_meta]
    if on_meta:
        raise invalid(f"wrap(): {', '.join(on_meta[:8])} have no values on rank 0; give a source")
    return state


def to_meta(model: nn.Module) -> None:
    """Parameters and persistent buffers that are not sharded yet; tied ones stay tied."""
    for tied in by_tensor(slots(model, "parameter", "buffer")).values():
        whole = tied[0].recorded
        on_meta = whole if isinstance(whole, DTensor) else empty_like(whole, "meta")
        for slot in tied:
            slot.owner[slot.key] = on_meta
    parameter_registry.remember_all(model)
