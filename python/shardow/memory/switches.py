"""Switches that trade memory for time or precision, put on a model and taken off again. Its modules' forward is wrapped
in place, so names, hooks and sharding do not see them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.utils import _apply_to_tensors
from torch.utils.checkpoint import checkpoint

from shardow.base.checks import instance, invalid, warn
from shardow.sharding.modules import is_container, repeated_blocks
from shardow.sharding.names import walk

Forward = Callable[..., Any]
Blocks = bool | str | Callable[[str, nn.Module], bool]


class Switch:
    """A module's forward with a switch on it, until ``is_off``. A deep copy's is of its own module."""

    def __init__(self, module: nn.Module, wrap: Forward) -> None:
        self.module, self.wrap, self.forward = module, wrap, module.forward
        self.had_own, self.is_off = "forward" in module.__dict__, False
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs) if self.is_off else self.wrap(self.module, self.forward, *args, **kwargs)


class Switches:
    """What apply() put on a model. ``remove()`` takes it off, in any order with others; a block of ``with`` does so at
    its end.
    """

    def __init__(self) -> None:
        self._put: list[Switch] = []

    def put(self, module: nn.Module, wrap: Forward, *options: Any) -> None:
        self._put.append(Switch(module, functools.partial(wrap, *options)))

    def remove(self) -> None:
        while self._put:
            removed = self._put.pop()
            removed.is_off = True
            while isinstance(top := removed.module.__dict__.get("forward"), Switch) and top.is_off:
                if top.had_own:
                    top.module.forward = top.forward
                else:
                    del top.module.forward

    def __enter__(self) -> Switches:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def is_switched(module: nn.Module) -> bool:
    """True where a switch is on it."""
    return isinstance(module.__dict__.get("forward"), Switch)


def apply(
    model: nn.Module,
    bf16: bool = True,
    activation_checkpointing: Blocks = True,
    *,
    attention_weights: bool = False,
    bf16_outputs: bool = False,
) -> Switches:
    """Makes training steps of ``model`` take less memory, until ``remove()`` or the end of a ``with`` block.

    Names, parameters and hooks stay; sharded models too.

    Args:
        bf16: forward in training runs under ``torch.autocast(..., torch.bfloat16)``; weights and optimizer stay as they
            are, and outputs are float32, as is a loss that is computed of them. In evaluation nothing changes. A CUDA
            device without bfloat16 goes on in the weights' own dtype, with a warning.
        activation_checkpointing: True or "blocks": the repeated blocks (members of a ModuleList or Sequential that has
            several of their class), or those that a predicate of (name, module) chooses (of what lies in another that
            it chooses, the outermost), keep their inputs alone in a training forward, and are run again in backward
            (``torch.utils.checkpoint``, not reentrant): the same gradients, bit for bit, where the forward is
            deterministic. In evaluation and under no_grad nothing changes.
        attention_weights: False: calls of nn.MultiheadAttention that do not say ``need_weights`` give None for them, so
            that they are never built; also in evaluation. Values differ in the last digits, since another kernel
            computes them.
        bf16_outputs: outputs stay bfloat16, as they do where forward is called under the caller's own autocast.

    Raises:
        ValueError: there are no such blocks.
    """
    instance("memory.apply(): model", model, nn.Module)
    chosen, switches = _chosen(model, activation_checkpointing), Switches()
    for module in chosen:
        switches.put(module, _checkpointed)
    if not attention_weights:
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                switches.put(module, _without_weights)
    if bf16:
        switches.put(model, _autocast, bf16_outputs)
    return switches


def _chosen(model: nn.Module, blocks: Blocks) -> list[nn.Module]:
    if blocks is False:
        return []
    if callable(blocks):
        below = [(name, module) for name, module in walk(model) if module is not model and not is_container(module)]
        chosen = {id(module): module for name, module in below if blocks(name, module)}
        # What is run again in backward is run again whole, and can't be saved and run again in itself.
        inside = {id(one) for module in chosen.values() for one in module.modules() if one is not module}
        found = [module for key, module in chosen.items() if key not in inside]
        what = "the predicate chose no module"
    elif isinstance(blocks, str) and blocks != "blocks":
        raise invalid(f"activation_checkpointing={blocks!r}; give True, False, 'blocks' or a test of (name, module)")
    else:
        found = repeated_blocks(model)
        what = "the model has no ModuleList or Sequential of several blocks of one class"
    if not found:
        raise invalid(f"memory.apply(): {what}; give activation_checkpointing a predicate of (name, module), or False")
    return found


def _checkpointed(module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    if module.training and torch.is_grad_enabled():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return forward(*args, **kwargs)


def _without_weights(
    module: nn.Module,
    forward: Forward,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if len(args) < 2:  # (key_padding_mask, need_weights, ...)
        kwargs.setdefault("need_weights", False)
    return forward(query, key, value, *args, **kwargs)


def _autocast(outputs: bool, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    device = next((p.device.type for p in module.parameters()), "cpu")
    if not module.training or not _has_bf16(device):
        return forward(*args, **kwargs)
    keeps = outputs or torch.is_autocast_enabled(device)  # the caller's goes on with bfloat16
    with torch.autocast(device, torch.bfloat16):
        result = forward(*args, **kwargs)
    wide = {torch.bfloat16: torch.float32}
    return result if keeps else _apply_to_tensors(lambda out: out.to(wide.get(out.dtype, out.dtype)), result)


def _has_bf16(device: str) -> bool:
    """Returns False, with a warning, on a CUDA device that has no bfloat16 or emulates it."""
    if device != "cuda" or not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False):
        return True
    warn("memory.apply(bf16=True): this device has no bfloat16; forward runs in the weights' dtype", RuntimeWarning)
    return False
