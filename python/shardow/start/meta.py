"""meta_init(): models that are built without memory; memory for what is on meta, and back. to_empty() is for FSDP1,
which wants memory when it wraps them. materialize() brings the values."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from shardow.base.checks import instance, invalid
from shardow.sharding import parameter_registry
from shardow.sharding.dtensor import empty_like
from shardow.sharding.groups import meshes_of
from shardow.sharding.names import join, walk
from shardow.sharding.slots import Slot, by_tensor, slots, slots_of
from shardow.start import recorded

# Keys of what to_empty() gave memory.
_valueless: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
_empty: WeakIdKeyDictionary = WeakIdKeyDictionary()  # what took the place of a tensor on meta


@contextlib.contextmanager
def meta_init() -> Iterator[None]:
    """Modules made under it have their parameters and persistent buffers on meta: shapes and dtypes, no memory.

    Other buffers (rotary tables and the like) get their values, since nothing could bring them back.

    What the constructors write into weights is recorded, and done again by ``materialize(model)``; so is what a call in
    the block writes (``model.init_weights()``).

    It changes torch.nn.Module for the time being, for all threads. An optimizer made from such parameters is bound anew
    by ``materialize(..., optimizer=)``.
    """
    with on_meta(buffers=True):
        yield


@contextlib.contextmanager
def on_meta(buffers: bool) -> Iterator[None]:
    """meta_init(), with the persistent ``buffers`` or without."""
    register_parameter, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer
    instead: WeakIdKeyDictionary = WeakIdKeyDictionary()  # a tensor that is registered under several names stays one
    recorder = recorded.Recorder()

    def parameter_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register_parameter(module, name, param)
        if param is None:
            return
        # Our own looks at plain tensors are nobody's to record, and cost less so.
        with torch._C.DisableTorchFunction() if type(param) is nn.Parameter else contextlib.nullcontext():
            if not param.is_meta:
                if param not in instead:
                    instead[param] = empty_like(param, "meta")
                module._parameters[name] = instead[param]
            recorder.register(module, name, param, instead.get(param, param))
            parameter_registry.remember(module, name)

    def buffer_on_meta(module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        register_buffer(module, name, tensor, persistent)
        if tensor is not None and buffers:
            module._buffers[name] = instead.setdefault(tensor, tensor.to("meta") if persistent else tensor)
            if persistent:
                recorder.register(module, name, tensor, instead[tensor])

    module_class: Any = nn.Module
    module_class.register_parameter, module_class.register_buffer = parameter_on_meta, buffer_on_meta
    try:
        with recorder:
            yield
    finally:
        module_class.register_parameter, module_class.register_buffer = register_parameter, register_buffer


def to_empty(module: nn.Module) -> None:
    """``FullyShardedDataParallel(..., param_init_fn=shardow.to_empty)``: FSDP1 can't wrap what is on meta. This gives a
    module's own tensors that are there memory without values, on the current accelerator or the CPU; FSDP1 shards it at
    once, unit by unit, and materialize() brings the values. What has values keeps them."""
    instance("to_empty(): module", module, nn.Module)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")  # an accelerator's current one
    for slot in slots_of(module):
        if slot.recorded.is_meta:
            if slot.recorded not in _empty:  # tied tensors stay so
                _empty[slot.recorded] = empty_like(slot.recorded, device)
            slot.owner[slot.key] = _empty[slot.recorded]
            _valueless.setdefault(module, set()).add(slot.key)


def valueless(model: nn.Module) -> set[str]:
    """All names of what to_empty() gave memory, and nobody has given values since."""
    return {join(name, key) for name, module in walk(model) for key in _valueless.get(module, ())}


def have_values(model: nn.Module) -> None:
    for module in model.modules():
        _valueless.pop(module, None)
        recorded.forget(module)


def give_memory(
    model: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None, held: dict[str, torch.Tensor]
) -> None:
    """Memory without values for what is on meta; what was one tensor stays one. ``held`` gets what has memory now, by
    all its names, also where this raises."""
    parameter_registry.forget_swapped(model)
    known = [where for where in by_tensor(slots(model)).values() if where[0].recorded.is_meta]
    if not known:
        return
    # A buffer that is persistent under one of its names comes from there.
    if tables := {slot.name for where in known if all(one.kind == "table" for one in where) for slot in where}:
        lost = f"buffers that no file has are on meta, without values: {', '.join(sorted(tables))}"
        raise invalid(
            f"{lost}; build the model under shardow.meta_init(), and with device='cpu' what its constructor makes on "
            "the device of a parameter, which is meta there"
        )
    meshes = meshes_of(slot.recorded for slot in slots(model))
    # The device of what is not sharded, as persistent buffers.
    beside = device or next((mesh.device_type for mesh in meshes), "cpu")

    def give(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        now = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        there = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else beside
        return empty_like(tensor.detach(), device or there, now)

    try:
        model._apply(give)
    finally:  # where memory has run out, of some
        _join(known)
        places = [(slot.name, slot.owner[slot.key]) for where in known for slot in where]
        held.update((name, tensor) for name, tensor in places if not tensor.is_meta)


def move_tables(model: nn.Module, device: torch.device | str) -> None:
    """Buffers that no file has follow the weights to ``device``; two names of one table stay so. Of a sharded model,
    which moves them itself, they stay."""
    if meshes_of(slot.recorded for slot in slots(model)):
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
    _join(known)


def _join(known: list[list[Slot]]) -> None:
    """Puts the tensor of the first place into the others; torch gives each a new one."""
    for where in known:
        for slot in where[1:]:
            slot.owner[slot.key] = where[0].owner[where[0].key]
