"""Where a parameter came from: its module and name, which outlive it when sharding puts another object in its place."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardow._options import invalid


@dataclass(frozen=True)
class _Origin:
    module: weakref.ref[nn.Module]
    key: str


_origins: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by parameter; tensors compare by value


def remember(module: nn.Module, key: str) -> None:
    """That the parameter which is there now is there."""
    _origins[module._parameters[key]] = _Origin(weakref.ref(module), key)


def forget_sharded(model: nn.Module) -> None:
    """Torch gives no memory to a sharded tensor that is weakly referenced; when it does it keeps the object, so that nothing need be remembered of it."""
    for param in model.parameters():
        if hasattr(param, "_local_tensor"):
            _origins.pop(param, None)


Bindings = list[list[tuple[nn.Module, str]]]  # by parameter group, where each of its parameters is


def bindings(optimizer: torch.optim.Optimizer, model: nn.Module) -> Bindings:
    """Where the optimizer's parameters are in the model, though other objects may be there now. Raises, before anything has changed, for one that is nowhere."""
    there = {id(p): (module, key) for module in model.modules() for key, p in module._parameters.items() if p is not None}
    modules = dict(model.named_modules())
    found: Bindings = []
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [None] * len(group["params"])
        places = []
        for i, (param, name) in enumerate(zip(group["params"], names, strict=True)):
            place = there.get(id(param)) or _remembered(param) or _named(modules, name)
            if place is None:
                raise invalid(
                    f"optimizer group {number}: parameter {i} of shape {tuple(param.shape)} is not in the model, and it is not known where it was; build the model under "
                    "shardow.meta_init(), or give the optimizer model.named_parameters()"
                )
            places.append(place)
        found.append(places)
    return found


def bind(optimizer: torch.optim.Optimizer, places: Bindings) -> None:
    """Puts the model's parameters into the groups; state goes with its parameter."""
    for group, where in zip(optimizer.param_groups, places, strict=True):
        now = [module._parameters[key] for module, key in where]
        for old, new in zip(group["params"], now, strict=True):
            if new is not None and old is not new and old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)
        group["params"] = now


def _remembered(param: torch.Tensor) -> tuple[nn.Module, str] | None:
    origin = _origins.get(param)
    module = None if origin is None else origin.module()
    return None if module is None or module._parameters.get(origin.key) is None else (module, origin.key)


def _named(modules: dict[str, nn.Module], name: str | None) -> tuple[nn.Module, str] | None:
    if name is None:
        return None
    path, _, key = name.rpartition(".")
    module = modules.get(path)
    return None if module is None or module._parameters.get(key) is None else (module, key)
