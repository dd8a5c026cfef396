"""What a forward pass is called with, tensors or their shapes; and what autograd keeps for backward: storages, each
once, that saved tensors hold when it has ended."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardow.base.checks import invalid
from shardow.model.modules import modes_kept

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
