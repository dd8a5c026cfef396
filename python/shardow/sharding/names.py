"""Gives modules and parameters the names that they have in the unwrapped model. The wrapper modules decide which
components are dropped, since a user's own submodule may be called ``module``. Only for keys in files, which come
without modules, known components are dropped by their spelling."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardow.base.checks import invalid, unsupported

#: {class name of a wrapper: the child that it wraps}. Importing the classes themselves would cost a second, and would
#: depend on their private modules.
_WRAPPERS = {
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}

#: Components that a file's keys may have and a plain model's names don't: wrappers', DDP's, PEFT's.
_IN_FILES = {*_WRAPPERS.values(), "base_layer", "parametrizations"}

_LORA = re.compile(r"(\blora_\w+)\.[^.]+(?=(?:\.weight|\.bias)?$)")
# DoRA's vector is a module in the model, and a plain tensor in the file.
_MAGNITUDE = re.compile(r"(\blora_magnitude_vector)\.weight$")


def wrapped_child(module: nn.Module) -> str | None:
    """Returns the name of the child that ``module`` only wraps; None for an ordinary module."""
    cls: Any = type(module)
    return next((child for child in _children_of(cls) if child in module._modules), None)


@functools.lru_cache(1024)
def _children_of(cls: Any) -> tuple[str, ...]:
    """Returns the names of children that modules of a class may only wrap."""
    return tuple(_WRAPPERS[base.__name__] for base in cls.__mro__ if base.__name__ in _WRAPPERS)


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the model, the module that it only wraps, and so on: the last module is no wrapper."""
    yield model
    while (child := wrapped_child(model)) is not None:
        model = model._modules[child]  # type: ignore[assignment]
        yield model


def unwrapped(model: nn.Module) -> nn.Module:
    return [*layers(model)][-1]


def walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields (clean name, module) for every module of the tree, wrappers under the name of the module that they wrap.
    Tied modules come under every name."""
    yield prefix, module
    wrapped = wrapped_child(module)
    for name, child in module._modules.items():
        if child is not None:
            yield from walk(child, prefix if name == wrapped else join(prefix, name))


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def without_wrappers(key: str) -> str:
    """Returns a file's key without wrappers' components but ``module``, as a user's own submodule may be called."""
    return ".".join(part for part in key.split(".") if part == "module" or part not in _WRAPPERS.values())


def clean_file_key(key: str) -> str:
    """Returns a file's key without the components that wrappers, DDP and PEFT insert, and without PEFT's leading
    ``base_model.model.``. It knows spellings only, and takes a user's own ``module`` for DDP's: to match a model, clean
    the model's names with it too, and compare the results."""
    parts = key.split(".")
    if "parametrizations" in parts and parts[-1] == "original":
        parts.pop()
    parts = [part for part in parts if part not in _IN_FILES]
    while parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    return ".".join(parts)


def without_adapter(name: str) -> str:
    """Returns a LoRA weight's name as PEFT writes it into an adapter's file: ``lora_A.weight`` for the
    ``lora_A.default.weight`` of a model. Other names stay as they are."""
    return _MAGNITUDE.sub(r"\1", _LORA.sub(r"\1", name))


def refuse_scripted(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises UnsupportedError where one of the named modules is torch.jit's."""
    for name, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            where = f"'{name}'" if name else "the model"
            raise unsupported(
                f"{where} is a {type(module).__name__} of torch.jit, which hides its parameters' places from Python: "
                "give the nn.Module that it was made from, and script the averaged model afterwards"
            )


def called(root: nn.Module) -> Callable[[str], str]:
    """Returns the function from a clean name (shardow.sharding.names) to the name in ``root.named_parameters()``, for
    parts of flat parameters too.
    """
    pairs = zip(walk(root), nn.Module.named_modules(root, remove_duplicate=False), strict=True)
    # The innermost of a module and its wrappers comes last, and is kept.
    prefixes = {clean: wrapped for (clean, _), (wrapped, _) in pairs}

    def name_of(clean: str) -> str:
        prefix, _, key = clean.rpartition(".")
        return join(prefixes.get(prefix, prefix), key)

    return name_of


def model_and_root(averaged: object) -> tuple[nn.Module, nn.Module]:
    """Returns (averaged module, module that names it) of a module, or of an object whose ``.module`` is both."""
    module = getattr(averaged, "module", None)
    if not isinstance(averaged, nn.Module):
        if isinstance(module, nn.Module):
            return module, module
        raise invalid(f"{type(averaged).__name__} is no nn.Module, and has none as .module", AttributeError)
    if not isinstance(module, nn.Module):
        return averaged, averaged
    if any(layer is module for layer in layers(averaged)):
        return averaged, module
    alike = {*map(id, averaged.parameters())} == {*map(id, module.parameters())}
    return (module, module) if alike and not isinstance(averaged, FSDPModule) else (averaged, averaged)
