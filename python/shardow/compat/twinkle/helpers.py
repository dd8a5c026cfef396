"""twinkle's helpers for a model that is sharded before it has weights, and for the optimizer that was made before."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardow.base.checks import invalid
from shardow.model import origins
from shardow.model.slots import by_tensor, slots, slots_of
from shardow.start.materialize import materialize

# The environment that transformers and accelerate listen to while weights are loaded.
_VARIABLES = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
_lock = threading.Lock()
_inside = 0
_outermost = contextlib.ExitStack()
# By optimizer, what each knew of its parameters.
_unbound: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[torch.Tensor, Any]] = weakref.WeakKeyDictionary()


def _broadcast_sharded_state_dict(
    model: nn.Module, full_sd: Mapping[str, torch.Tensor], device_type: str = "cuda"
) -> None:
    """Rank 0's ``full_sd`` into the model's shards; the others give {}. A model on meta gets memory on
    ``device_type``."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    materialize(model, full_sd if first else None, device=device_type)


def _get_non_persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """By every name that a buffer has."""
    return {
        slot.name: slot.recorded.clone()
        for prefix, module in model.named_modules()
        for slot in slots_of(module, prefix, "table")
    }


def _restore_non_persistent_buffers(
    model: nn.Module, saved_buffers: Mapping[str, torch.Tensor], device: torch.device | str
) -> None:
    for name, saved in saved_buffers.items():
        prefix, _, key = name.rpartition(".")
        model.get_submodule(prefix).register_buffer(key, saved.to(device), persistent=False)


def _unbind_optimizer_params(optimizer: torch.optim.Optimizer) -> None:
    """Lets the parameters' memory go; where they were is remembered, as far as it is known, and what the optimizer
    knows of them.
    """
    states = _unbound[optimizer] = {}
    for group in optimizer.param_groups:
        left = [torch.empty(1, dtype=param.dtype, device="meta") for param in group["params"]]
        for param, instead in zip(group["params"], left, strict=True):
            origins.inherit(instead, param)
            if param in optimizer.state:
                states[instead] = optimizer.state.pop(param)
        group["params"] = left


def _rebind_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Parameters into the optimizer's groups: where they were, else by ``param_names``, else, of one group, in order;
    or raises.
    """
    found: list[origins.Places] = []
    for number, (group, known) in enumerate(
        zip(optimizer.param_groups, origins.known_places(optimizer, model), strict=True)
    ):
        if None in known and len(optimizer.param_groups) == 1:
            found.append(_in_order(model, len(known)))
        else:
            found.append([place for place in known if place is not None])
        if len(found[-1]) != len(group["params"]):
            raise invalid(
                f"optimizer group {number}: it is not known which parameters it had; make it from "
                "model.named_parameters()"
            )
    optimizer.state.update(_unbound.pop(optimizer, {}))
    origins.bind(optimizer, found)
    return optimizer


def _in_order(model: nn.Module, count: int) -> origins.Places:
    """Of all parameters, or of those that are trained."""
    everything = [where[0] for where in by_tensor(slots(model, "parameter")).values()]
    chosen = everything if len(everything) == count else [slot for slot in everything if slot.recorded.requires_grad]
    return [(slot.module, slot.key) for slot in chosen]


@contextlib.contextmanager
def fsdp_pretrained_load_context(enabled: bool) -> Iterator[None]:
    """transformers' from_pretrained() loads weights on rank 0 alone inside. It listens to variables of the environment,
    which are the process's: they are restored when the last of several blocks, in whatever threads, has ended."""
    global _inside
    if not enabled:
        yield
        return
    with _lock:
        if _inside == 0:
            _outermost.enter_context(unchanged_environment())
            os.environ.update(dict.fromkeys(_VARIABLES, "true"))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _outermost.close()


@contextlib.contextmanager
def unchanged_environment() -> Iterator[None]:
    """accelerate leaves its options in the environment, for transformers: every later from_pretrained() of a model that
    is not wrapped would be without weights on all ranks but the first."""
    before = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    try:
        yield
    finally:
        for name in _VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(before)
