"""meta_init(): models that are built without memory.

to_empty() is for FSDP1, which wants memory when it wraps them. materialize() brings the values.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardow.model import origins
from shardow.model.names import join, walk
from shardow.model.slots import slots_of
from shardow.start import recorded

_valueless: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()  # keys of what to_empty() gave memory
_empty: WeakIdKeyDictionary = WeakIdKeyDictionary()  # what took the place of a tensor on meta


@contextlib.contextmanager
def meta_init() -> Iterator[None]:
    """Modules made under it have their parameters and persistent buffers on meta: shapes and dtypes, no memory.

    Other buffers (rotary tables and the like) get their values, since nothing could bring them back.

    What the constructors write into weights is recorded, and done again by ``materialize(model)``; so is what a call in the block writes
    (``model.init_weights()``).

    It changes torch.nn.Module for the time being, for all threads. An optimizer made from such parameters is bound anew by
    ``materialize(..., optimizer=)``.
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
                    instead[param] = moved_to_meta(param)
                module._parameters[name] = instead[param]
            recorder.register(module, name, param, instead.get(param, param))
            origins.remember(module, name)

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


def moved_to_meta(param: nn.Parameter) -> nn.Parameter:
    kept = {key: value for key, value in vars(param).items() if not key.startswith("_")}
    moved = type(param)(param.detach().to("meta"), requires_grad=param.requires_grad)
    vars(moved).update(kept)
    return moved


def to_empty(module: nn.Module) -> None:
    """``FullyShardedDataParallel(..., param_init_fn=shardow.to_empty)``: FSDP1 can't wrap what is on meta.

    This gives a module's own tensors that are there memory without values, on the current accelerator or the CPU; FSDP1 shards it at once,
    unit by unit, and materialize() brings the values. What has values keeps them.
    """
    accelerator = torch.accelerator.current_accelerator()
    device = torch.device("cpu") if accelerator is None else torch.device(accelerator.type, torch.accelerator.current_device_index())
    for slot in slots_of(module):
        if slot.recorded.is_meta:
            if slot.recorded not in _empty:  # tied tensors stay so
                _empty[slot.recorded] = _like(slot.recorded, device)
            slot.owner[slot.key] = _empty[slot.recorded]
            _valueless.setdefault(module, set()).add(slot.key)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = torch.empty_like(tensor, device=device, requires_grad=False)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def valueless(model: nn.Module) -> set[str]:
    """All names of what to_empty() gave memory, and nobody has given values since."""
    return {join(name, key) for name, module in walk(model) for key in _valueless.get(module, ())}


def have_values(model: nn.Module) -> None:
    for module in model.modules():
        _valueless.pop(module, None)
        recorded.forget(module)
