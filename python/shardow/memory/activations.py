"""What a forward pass is called with, tensors or their shapes; and what autograd keeps for backward: storages, each
once, that saved tensors hold when it has ended. Fake is a model that is only run for its shapes."""

from __future__ import annotations

import contextlib
import copy
import logging
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardow.base.checks import invalid, unsupported
from shardow.sharding.dtensor import empty_like
from shardow.sharding.modules import modes_kept

Like = Callable[[torch.Tensor], torch.Tensor]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def as_arguments(batch: Any, like: Like) -> Arguments:
    """(args, kwargs), tensors through ``like``. A tensor is the only argument, a tuple or list the positional ones, a
    dict those by keyword; a shape (float32) or (shape, dtype) stands for a tensor on meta; whatever else is among them
    stays as it is."""

    def leaf(value: Any) -> Any:
        if (form := shape_and_dtype(value)) is not None:
            value = torch.empty(form[0], dtype=form[1], device="meta")
        return _pytree.tree_map_only(torch.Tensor, like, value)

    if isinstance(batch, Mapping):
        return (), {name: leaf(value) for name, value in batch.items()}
    if isinstance(batch, torch.Tensor) or (shape_and_dtype(batch) is not None and len(batch)):
        return (leaf(batch),), {}
    if isinstance(batch, (tuple, list)):
        return tuple(leaf(value) for value in batch), {}
    forms = "a tensor or its shape, a tuple of them, or a dict of them by the names of forward()'s arguments"
    raise invalid(f"batch is a {type(batch).__name__}; give {forms}")


def dtype_of(value: Any) -> torch.dtype:
    """A dtype, or its name: "bfloat16"."""
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype):
        raise invalid(f"{value!r} is no dtype; give torch.bfloat16 or 'bfloat16', for example")
    return found


def shape_and_dtype(value: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Of a shape, which is float32's, or (shape, dtype); None: it is neither."""
    if _is_shape(value):
        return tuple(value), torch.float32
    if (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and _is_shape(value[0])
        and isinstance(value[1], (torch.dtype, str))
    ):
        return tuple(value[0]), dtype_of(value[1])
    return None


def _is_shape(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(
        isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in value
    )


class _Saved:
    """A tensor in autograd's hands; gone when its node of the graph is. Detached, since an output would hold its own
    node.
    """

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


def kept_bytes(forward: Callable[[], Any], own: Callable[[], Iterable[torch.Tensor]]) -> int:
    """Bytes that autograd keeps while the result of ``forward`` lives, without those of ``own()``, which is asked
    afterwards. A sharded model's unsharded weights are there or freed by then."""
    saved: list[weakref.ref[_Saved]] = []

    def pack(tensor: torch.Tensor) -> _Saved:
        one = _Saved(tensor)
        saved.append(weakref.ref(one))
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
        result = forward()
    alive = [one.tensor for one in (reference() for reference in saved) if one is not None]
    del result
    return storage_bytes(alive, besides=own())


def storage_bytes(tensors: Iterable[torch.Tensor], besides: Iterable[torch.Tensor] = ()) -> int:
    """Of all storages that ``tensors`` lie in on this rank, each once, without those of ``besides``."""
    found = _by_identity(tensors)
    left_out = _by_identity(besides)
    return sum(storage.nbytes() for key, storage in found.items() if key not in left_out)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def as_in_training(model: nn.Module) -> Iterator[None]:
    """In training mode where the model is in evaluation, as pretrained ones come. A model in training stays as it is,
    with parts in evaluation if it has some."""
    with modes_kept(model):
        if not model.training:
            model.train()
        yield


def _by_identity(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """By torch's own object, since storages on meta have no address, and freed ones lose theirs."""
    return {storage._cdata: storage for tensor in tensors for storage in _storages(tensor)}


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(tensor):  # a DTensor and its like: this rank's part
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        yield from (storage for part in inner if isinstance(part, torch.Tensor) for storage in _storages(part))
    elif tensor.layout is torch.sparse_coo:
        yield from (part.untyped_storage() for part in (tensor._indices(), tensor._values()))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()


class Fake:
    """A copy of ``model`` on ``device`` without memory, and the batch that it is called with. FakeTensorMode goes the
    way that real kernels go on the device, autocast and attention included, and allocates nothing."""

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
