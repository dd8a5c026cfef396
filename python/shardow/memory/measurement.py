"""measure(): what a model that is there holds on this rank, by the keys that plan() has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardow.base.checks import instance, invalid
from shardow.ema import EMA
from shardow.memory.activations import as_arguments, as_in_training, kept_bytes, storage_bytes, tensors_in
from shardow.memory.prediction import Usage, usage
from shardow.sharding.dtensor import modules_of, reshard
from shardow.sharding.fsdp1 import Fsdp1Adapter
from shardow.sharding.slots import Slot, slots


def measure(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    batch: Any = None,
    *,
    ema: EMA | nn.Module | None = None,
    loss: Callable[[Any], Any] | None = None,
) -> Usage:
    """Counts the bytes that this rank holds now, by plan()'s keys: after an optimizer step and before zero_grad() there
    are all of them.

    On CUDA also "device_peak".

    With a batch, or under DDP or a sharding, call it where every rank does: it runs a forward pass, as in training but
    without backward. Weights, gradients, optimizer, buffers and torch's random state are what they were afterwards;
    hooks on the model are called.

    Args:
        model: sharded or not, with the switches that are on it.
        batch: tensors as for plan(), with values; None: activations are None.
        ema: a shardow.EMA, or a module that holds averages.
        loss: as for plan().

    Raises:
        ValueError: a model on meta; whatever the forward pass raises.
    """
    instance("model", model, nn.Module)
    if any(tensor.is_meta for tensor in _tensors(model)):
        raise invalid("measure() runs the model, and some of it is on meta, without values; plan() takes it as it is")
    parts = _Parts(model)
    activations = None if batch is None else _activations(model, parts, batch, loss)
    parts.reshard()
    found = usage(
        weights=storage_bytes(parts.tensors()),
        gradients=storage_bytes(tensor.grad for tensor in parts.tensors() if tensor.grad is not None),
        optimizer=0 if optimizer is None else storage_bytes(tensors_in(list(optimizer.state.values()))),
        averages=0 if ema is None else storage_bytes(_averages(ema)),
        activations=activations,
    )
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"]
    if devices:
        found["device_peak"] = torch.cuda.max_memory_allocated(devices[0])
    return found


class _Parts:
    """A model's tensors on this rank, and a way back to that after a forward pass has brought whole ones together."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._fsdp2, self._fsdp1 = modules_of(model), Fsdp1Adapter(model)

    def reshard(self) -> None:
        reshard(self._fsdp2)
        self._fsdp1.reshard()

    def tensors(self) -> list[torch.Tensor]:
        """Returns them as they lie now, sharded or together; what was freed since has storages without bytes."""
        flat = self._fsdp1.flat_parameters()
        together = (getattr(parameter, "_full_param_padded", None) for parameter in flat)
        sharded = [*_tensors(self._model), *self._fsdp1.shards(), *flat]
        return [*sharded, *(tensor for tensor in together if tensor is not None)]


def _activations(model: nn.Module, parts: _Parts, batch: Any, loss: Callable[[Any], Any] | None) -> int:
    args, kwargs = as_arguments(batch, _compact)

    def forward() -> Any:
        output = model(*args, **kwargs)
        return output if loss is None else (output, loss(output))

    parts.reshard()
    try:
        with _as_it_was(model), as_in_training(model), torch.enable_grad():
            return kept_bytes(forward, parts.tensors)
    finally:
        parts.reshard()


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers, torch's random state and what DDP expects of the next step are those of before."""
    kinds = {tensor.device.type for tensor in model.parameters()} - {"cpu"}
    kind = next(iter(kinds), "cuda")
    devices = sorted({tensor.device.index or 0 for tensor in model.parameters() if tensor.device.type == kind})
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices, device_type=kind))
        for slot in slots(model, "buffer", "table"):
            stack.callback(_put_back, slot, slot.recorded.clone())
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.callback(setattr, module, "require_forward_param_sync", module.require_forward_param_sync)
                stack.enter_context(module.no_sync())  # its reducer would wait for a backward
        yield


@torch.no_grad()
def _put_back(slot: Slot, before: torch.Tensor) -> None:
    slot.owner[slot.key] = slot.recorded.copy_(before)


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _averages(ema: EMA | nn.Module) -> list[torch.Tensor]:
    if isinstance(ema, EMA):
        return [average for one in ema._averages.tracked for average in one.averages]
    if isinstance(ema, nn.Module):
        return _tensors(ema)
    raise invalid(f"ema is a {type(ema).__name__}; give a shardow.EMA, or the module that holds the averages")


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A slice of a large tensor would count with all of it."""
    if tensor.is_meta:
        raise invalid(f"measure() runs the model: give a tensor where batch has the shape {tuple(tensor.shape)}")
    if (
        isinstance(tensor, DTensor)
        or tensor.layout is not torch.strided
        or tensor.untyped_storage().nbytes() <= tensor.nbytes
    ):
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
