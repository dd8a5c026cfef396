"""Memory for what is on meta, and back: every place where a model keeps a tensor keeps it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardow.base.checks import invalid
from shardow.model import origins
from shardow.model.dtensor import sharded_like
from shardow.model.groups import meshes_of
from shardow.model.slots import Slot, by_tensor, slots


def give_memory(model: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Memory without values for what is on meta; what was one tensor stays one. Returns what has memory now."""
    origins.forget_swapped(model)
    known = [where for where in by_tensor(slots(model)).values() if where[0].recorded.is_meta]
    if not known:
        return []
    _refuse_tables(known)

    beside = device or next((mesh.device_type for mesh in meshes_of(model)), "cpu")  # of what is not sharded, as persistent buffers

    def give(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        now = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if not isinstance(tensor, DTensor):
            return torch.empty_like(tensor, device=beside, dtype=now)
        local = torch.empty_like(tensor._local_tensor, device=device or tensor.device_mesh.device_type, dtype=now)
        return sharded_like(tensor, local)

    try:
        model._apply(give)
    except BaseException:  # out of memory
        take_memory(model, [tensor for where in known if not (tensor := _now(where[0])).is_meta])
        raise
    return _joined(known)


def move_tables(model: nn.Module, device: torch.device | str) -> None:
    """Buffers that no file has follow the weights to ``device``; two names of one table stay so.

    Of a sharded model, which moves them itself, they stay.
    """
    if meshes_of(model):
        return
    for where in by_tensor(slots(model)).values():
        if where[0].kind == "table":
            moved = where[0].recorded.to(device)
            for slot in where:
                slot.owner[slot.key] = moved


def take_memory(model: nn.Module, given: Iterable[torch.Tensor]) -> None:
    """What had no memory has none again."""
    ours = {id(tensor) for tensor in given}
    if not ours:
        return
    known = [where for key, where in by_tensor(slots(model)).items() if key in ours]
    model._apply(lambda tensor: tensor.to("meta") if id(tensor) in ours else tensor)
    _joined(known)


def names_of(model: nn.Module, tensors: Collection[torch.Tensor]) -> set[str]:
    """All clean names of the tensors."""
    ours = {id(tensor) for tensor in tensors}
    return {slot.name for slot in slots(model) if id(slot.recorded) in ours}


def called(model: nn.Module, tensors: Collection[torch.Tensor], names: Collection[str]) -> list[torch.Tensor]:
    """Those of the tensors that have one of the names."""
    wanted = {id(slot.recorded) for slot in slots(model) if slot.name in names}
    return [tensor for tensor in tensors if id(tensor) in wanted]


def _now(slot: Slot) -> torch.Tensor:
    found: torch.Tensor = slot.owner[slot.key]
    return found


def _joined(known: list[list[Slot]]) -> list[torch.Tensor]:
    """Puts the tensor of the first place into the others; torch gives each a new one."""
    tensors = []
    for where in known:
        tensors.append(_now(where[0]))
        for slot in where[1:]:
            slot.owner[slot.key] = tensors[-1]
    return tensors


def _refuse_tables(known: list[list[Slot]]) -> None:
    """A buffer that is persistent under one of its names comes from there."""
    tables = {slot.name for where in known if all(one.kind == "table" for one in where) for slot in where}
    if tables:
        raise invalid(
            f"buffers that no file has are on meta, without values: {', '.join(sorted(tables))}; build the model under shardow.meta_init()"
        )
