"""A model that is only run for its shapes. FakeTensorMode goes the way that real kernels go on the device, autocast and
attention included, and allocates nothing."""

from __future__ import annotations

import contextlib
import copy
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardow.base.checks import invalid, unsupported
from shardow.memory.activations import as_arguments, as_in_training, kept_bytes
from shardow.model.dtensor import empty_like


class Fake:
    """A copy of ``model`` on ``device`` without memory, and the batch that it is called with."""

    def __init__(self, model: nn.Module, batch: Any, loss: Callable[[Any], Any] | None, device: torch.device) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device, self._loss = device, loss
        self.model = self._copy(model)
        with self._mode:
            self._args, self._kwargs = as_arguments(batch, self._like)

    def kept(self) -> int:
        """Bytes that autograd keeps at the end of a forward pass in training. Raises where a kernel keeps memory that
        no shape tells."""
        fused = nn.LSTM if self._device.type == "cpu" else nn.RNNBase
        if hidden := [name or "the model" for name, layer in self.model.named_modules() if isinstance(layer, fused)]:
            raise unsupported(f"plan(): the kernel of {hidden[0]} keeps memory that torch does not tell; measure()")
        with torch.random.fork_rng(devices=[]), _quiet(), self._mode, torch.enable_grad(), as_in_training(self.model):
            return kept_bytes(self._forward, lambda: [*self.model.parameters(), *self.model.buffers()])

    def _forward(self) -> Any:
        try:
            output = self.model(*self._args, **self._kwargs)
        except Exception as error:
            raise self._explained(error) from error
        try:
            return output if self._loss is None else (output, self._loss(output))
        except Exception as error:
            raise invalid(f"plan(): loss= failed on the model's output: {type(error).__name__}: {error}") from error

    def _copy(self, model: nn.Module) -> nn.Module:
        """Structure and attributes are copied; tensors of modules are replaced on the way, so that none is."""
        instead: dict[int, Any] = {}
        with self._mode:
            for module in model.modules():
                tensors = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
                for tensor in tensors:
                    if isinstance(tensor, torch.Tensor) and id(tensor) not in instead:
                        instead[id(tensor)] = self._like(tensor)
        try:
            return copy.deepcopy(model, instead)
        except Exception as error:
            way_out = "give one that is freshly built, on meta for example"
            raise invalid(f"plan(): this {type(model).__name__} can't be copied ({error}); {way_out}") from error

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            raise unsupported(f"plan(): a tensor of layout {tensor.layout}")
        return empty_like(tensor, self._device)

    def _explained(self, error: Exception) -> Exception:
        needs = ("DataDependentOutput", "DynamicOutputShape", "UnsupportedFakeTensor", "UnsupportedOperator")
        if isinstance(error, tuple(getattr(fake_tensor, f"{name}Exception") for name in needs)):
            way_out = "leave batch= out, or run it and measure()"
            return unsupported(f"plan(): {self._where(error)} needs values, not just shapes ({error}); {way_out}")
        return invalid(f"plan(): {self._where(error)} refused the batch: {type(error).__name__}: {error}")

    def _where(self, error: Exception) -> str:
        """The innermost module that was running."""
        known = {id(module): (name, module) for name, module in self.model.named_modules()}
        name, found = "", self.model
        for frame, _ in traceback.walk_tb(error.__traceback__):
            name, found = known.get(id(frame.f_locals.get("self")), (name, found))
        return f"'{name}' ({type(found).__name__})" if name else f"the model ({type(found).__name__})"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """FakeTensorMode logs what it raises, traceback and all."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
