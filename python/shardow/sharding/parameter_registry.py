"""Records the module and key of each parameter, which outlive it when sharding puts another object in its place."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from shardow.base.checks import instance, invalid
from shardow.distributed.gather import extract_region
from shardow.sharding.dtensor import region_of, sharded_like
from shardow.sharding.names import walk
from shardow.sharding.slots import slots

# By parameter, since tensors compare by value: (weak reference to its module, key).
_origins: WeakIdKeyDictionary = WeakIdKeyDictionary()


def remember(module: nn.Module, key: str) -> None:
    """Records that the module's current parameter ``key`` is in this place."""
    _origins[module._parameters[key]] = (weakref.ref(module), key)


def remember_all(model: nn.Module) -> None:
    for slot in slots(model, "parameter"):
        remember(slot.module, slot.key)


def forget_swapped(model: nn.Module) -> None:
    """Forgets the parameters that torch will swap, before shardow or model.to() gives them other memory: torch refuses
    to swap weakly referenced parameters. DTensors stay the same objects, and are found in the model itself."""
    always = torch.__future__.get_swap_module_params_on_conversion()
    for slot in slots(model, "parameter"):
        if always or is_traceable_wrapper_subclass(slot.recorded):
            _origins.pop(slot.recorded, None)


Places = list[tuple[nn.Module, str]]
Bindings = list[Places]  # by parameter group, the place of each of its parameters


def bindings(optimizer: torch.optim.Optimizer, model: nn.Module) -> Bindings:
    """Returns the places of the optimizer's parameters in the model, though other objects may be in these now. Raises,
    before anything has changed, for a parameter that has no place."""
    instance("optimizer", optimizer, torch.optim.Optimizer)
    groups: Bindings = []
    current = {id(slot.recorded): (slot.module, slot.key) for slot in slots(model, "parameter")}
    modules = {**dict(model.named_modules()), **dict(walk(model))}  # by their names now, and by those without wrappers
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [""] * len(group["params"])
        groups.append([])
        for i, (parameter, name) in enumerate(zip(group["params"], names, strict=True)):
            reference, key = _origins.get(parameter, (lambda: None, ""))
            path, _, named_key = name.rpartition(".")
            place = current.get(id(parameter)) or _place(reference(), key) or _place(modules.get(path), named_key)
            if place is None:
                lost = (
                    f"parameter {i} of shape {tuple(parameter.shape)} is not in the model, and it is not known where "
                    "it was"
                )
                hint = "build the model under shardow.meta_init(), or give the optimizer model.named_parameters()"
                raise invalid(f"optimizer group {number}: {lost}; {hint}")
            groups[-1].append(place)
    return groups


def bind(optimizer: torch.optim.Optimizer, places: Bindings) -> None:
    """Puts the model's parameters into the groups; state goes with its parameter, and is sharded like it."""
    groups = [[module._parameters[key] for module, key in where] for where in places]
    before = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    pairs = zip(before, itertools.chain(*groups), strict=True)
    moved = [(old, new) for old, new in pairs if new is not None and old is not new and old in optimizer.state]
    # Makes the states, for which memory may lack, before anything changes.
    states = [state_for(new, optimizer.state[old]) for old, new in moved]
    for (old, new), state in zip(moved, states, strict=True):
        del optimizer.state[old]
        optimizer.state[new] = state
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = parameters


def state_for(param: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _sharded_as(param, value) for key, value in state.items()}


def _sharded_as(param: torch.Tensor, value: Any) -> Any:
    """Returns this rank's part of a state tensor (a momentum) of the whole parameter; other values as they are."""
    if (
        not isinstance(param, DTensor)
        or not isinstance(value, torch.Tensor)
        or isinstance(value, DTensor)
        or value.shape != param.shape
    ):
        return value
    if not value.ndim:  # a step, even where the parameter is a scalar too
        return value
    local = torch.empty_like(param._local_tensor, dtype=value.dtype)
    flat = torch.empty(local.numel(), dtype=value.dtype, device=value.device)
    extract_region(value, region_of("a state of the optimizer", param), flat)
    local.copy_(flat.view(local.shape))
    return sharded_like(param, local)


def _place(module: nn.Module | None, key: str) -> tuple[nn.Module, str] | None:
    return None if module is None or module._parameters.get(key) is None else (module, key)
