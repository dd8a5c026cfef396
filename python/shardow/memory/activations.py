"""What autograd keeps for backward: storages, each once, that saved tensors hold when a forward pass has ended."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardow.model.modules import modes_kept


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
