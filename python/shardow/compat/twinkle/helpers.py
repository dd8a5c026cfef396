"""twinkle's helpers for a model that is sharded before it has weights, and for the optimizer that was made before."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardow.base.checks import invalid
from shardow.model import origins
from shardow.start.materialize import materialize

_unbound: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[list[_Left]]] = weakref.WeakKeyDictionary()


def _broadcast_sharded_state_dict(model: nn.Module, full_sd: Mapping[str, torch.Tensor], device_type: str = "cuda") -> None:
    """Rank 0's ``full_sd`` into the model's shards; the others give {}. A model on meta gets memory on ``device_type``."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    materialize(model, full_sd if first else None, device=device_type)


def _get_non_persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """By every name that a buffer has."""
    return {
        f"{prefix}.{key}" if prefix else key: buffer.clone()
        for prefix, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key in module._non_persistent_buffers_set
    }


def _restore_non_persistent_buffers(model: nn.Module, saved_buffers: Mapping[str, torch.Tensor], device: torch.device | str) -> None:
    for name, saved in saved_buffers.items():
        prefix, _, key = name.rpartition(".")
        model.get_submodule(prefix).register_buffer(key, saved.to(device), persistent=False)


@dataclass(frozen=True)
class _Left:
    """What an unbound parameter has left: its module and key, and the optimizer's state of it."""

    place: tuple[nn.Module, str] | None
    state: dict[str, Any] | None


def _unbind_optimizer_params(optimizer: torch.optim.Optimizer) -> None:
    """Lets the parameters' memory go; where they were is remembered, as far as it is known, and what the optimizer knows of them."""
    _unbound[optimizer] = [
        [_Left(origins.of(param), optimizer.state.pop(param, None)) for param in group["params"]] for group in optimizer.param_groups
    ]
    for group in optimizer.param_groups:
        group["params"] = [torch.empty(1, dtype=param.dtype, device="meta") for param in group["params"]]


def _rebind_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Parameters into the optimizer's groups: where they were, else by ``param_names``, else, of one group, in order; or raises."""
    named = dict(model.named_parameters(remove_duplicate=False))
    known = _unbound.get(optimizer) or [
        [_Left(None, optimizer.state.get(param)) for param in group["params"]] for group in optimizer.param_groups
    ]
    trainable = [param for param in model.parameters() if param.requires_grad]
    groups: list[list[torch.Tensor]] = []
    for number, (group, places) in enumerate(zip(optimizer.param_groups, known, strict=True)):
        names = group.get("param_names") or [None] * len(places)
        found: list[torch.Tensor | None] = [
            left.place[0]._parameters.get(left.place[1]) if left.place else named.get(name)
            for left, name in zip(places, names, strict=True)
        ]
        if any(param is None for param in found) and len(known) == 1:
            everything = list(model.parameters())
            found = [*(everything if len(everything) == len(found) else trainable)]
        groups.append([param for param in found if param is not None])
        if len(groups[-1]) != len(places):
            raise invalid(
                f"optimizer group {number}: it is not known which of the model's parameters it had; make it from model.named_parameters()"
            )
    for group, params, left in zip(optimizer.param_groups, groups, known, strict=True):
        group["params"] = params
        optimizer.state.update(
            {param: origins.state_for(param, one.state) for param, one in zip(params, left, strict=True) if one.state is not None}
        )
    _unbound.pop(optimizer, None)
    return optimizer
