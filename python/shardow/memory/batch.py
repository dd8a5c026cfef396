"""What plan() and measure() take for a batch: tensors or their shapes, as the arguments of forward()."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree

from shardow.base.checks import invalid

Like = Callable[[torch.Tensor], torch.Tensor]
OfShape = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def as_arguments(batch: Any, like: Like, of_shape: OfShape) -> Arguments:
    """(args, kwargs), tensors through ``like``. A tensor is the only argument, a tuple or list the positional ones, a
    dict those by keyword; a shape (float32) or (shape, dtype) stands for a tensor; whatever else is among them stays as
    it is."""

    def leaf(value: Any) -> Any:
        form = shape_and_dtype(value)
        return of_shape(*form) if form is not None else _pytree.tree_map_only(torch.Tensor, like, value)

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
