"""Bytes that an optimizer keeps, found by a step of its own class on meta. Any optimizer that torch can step there
tells its state itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardow.base.checks import invalid, unsupported
from shardow.memory.activations import storage_bytes, tensors_in

_CLASSES = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip
_BY_NAME = {name.lower(): name for name in _CLASSES} | {"sgd-momentum": "SGD"}

#: They choose kernels that meta does not have, and no state.
_WAYS = {"fused": False, "foreach": None, "capturable": False, "differentiable": False}


class _Ones(TorchDispatchMode):
    """Numbers that an optimizer reads from tensors on meta, as Adafactor does, are 1: the size of its state does not
    hang on them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))


Parts = Mapping[Any, torch.nn.Parameter]


def state_bytes(optimizer: Any, parts: Parts) -> int:
    """``optimizer``: a name, a class, an instance, or None. ``parts``: what a rank holds of each trainable parameter,
    on meta, by the parameter's id, or by its name where there is only that."""
    if optimizer is None or not parts:
        return 0
    cls, groups, options = _recipe(optimizer, parts)
    options = {**options, **{name: value for name, value in _WAYS.items() if name in inspect.signature(cls).parameters}}
    for part in parts.values():
        part.grad = torch.empty_like(part)
    try:
        with _Ones():  # type: ignore[no-untyped-call]
            twin = cls(groups, **options)
            twin.step()
    except Exception as error:
        failed = f"a step on meta failed with {type(error).__name__}: {error}"
        raise unsupported(
            f"plan(): the state of {cls.__name__} is not known: {failed}; give an instance, or optimizer=None"
        ) from error
    return storage_bytes(tensors_in(list(twin.state.values())))


def _recipe(optimizer: Any, parts: Parts) -> tuple[type[torch.optim.Optimizer], list[dict[str, Any]], dict[str, Any]]:
    """Class, groups and options."""
    one_group: list[dict[str, Any]] = [{"params": list(parts.values())}]
    if isinstance(optimizer, str):
        if optimizer.lower() not in _BY_NAME:
            names = ", ".join(sorted(_BY_NAME))
            raise invalid(
                f"optimizer={optimizer!r}; the names are {names}; give others as a class or an instance, or None"
            )
        name, options = _BY_NAME[optimizer.lower()], {"momentum": 0.9} if optimizer.lower() == "sgd-momentum" else {}
        if not hasattr(torch.optim, name):
            raise unsupported(f"torch {torch.__version__} has no torch.optim.{name}")
        return getattr(torch.optim, name), one_group, options
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return optimizer, one_group, {}
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise invalid(
            f"optimizer is a {type(optimizer).__name__}; give a name, a class of torch.optim.Optimizer, an instance, "
            "or None"
        )
    known = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    # Shapes alone do not tell which parameter is in which group.
    by_name = all(isinstance(key, str) for key in parts)
    return type(optimizer), one_group if by_name else _groups(optimizer, parts), options


def _groups(optimizer: torch.optim.Optimizer, parts: Parts) -> list[dict[str, Any]]:
    """Each group with the options that it has; what is in no group has no state."""
    groups = []
    for group in optimizer.param_groups:
        held = [parts[id(p)] for p in group["params"] if id(p) in parts]
        if held:
            groups.append(
                {**{key: value for key, value in group.items() if key != "param_names"}, **_WAYS, "params": held}
            )
    if not groups:
        raise invalid(
            f"the {type(optimizer).__name__} was made of other parameters than the model's trainable ones; give its "
            "class"
        )
    return groups
