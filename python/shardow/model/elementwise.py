"""What tensor operations do with a Piece: each element by itself, or not at all, since other ranks hold the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shardow import _core
from shardow.base.checks import unsupported
from shardow.ranks import gather

_aten = torch.ops.aten
#: One result element from one element each, though torch does not tag them so.
_KEEP = {
    _aten.clone.default, _aten.detach.default, _aten.alias.default, _aten._to_copy.default, _aten.empty_like.default,
    _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default, _aten.fill_.Scalar, _aten.fill_.Tensor,
    _aten.zero_.default, _aten.copy_.default, _aten.lerp.Scalar, _aten.lerp_.Scalar, _aten._pin_memory.default,
}  # fmt: skip
_NEW: dict[Any, Any] = {
    _aten.new_empty.default: torch.empty,
    _aten.new_zeros.default: torch.zeros,
    _aten.new_ones.default: torch.ones,
}
_REDUCE = ("norm", "max", "min")  # among torch's _foreach_ functions


def run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``func`` on the pieces' local memory. Raises UnsupportedError where other ranks' elements are needed, or regions
    differ.
    """
    if func in _NEW:
        return _new(func, *args, **kwargs)
    flat, spec = tree_flatten((args, dict(kwargs)))
    pieces = [one for one in flat if _is_piece(one)]
    if func is _aten.equal.default:
        return (
            len(pieces) == 2 and pieces[0].region == pieces[1].region and torch.equal(pieces[0].local, pieces[1].local)
        )
    if func is _aten.copy_.default and len(pieces) == 1:
        return _copy(args[0], args[1])
    if not _elementwise(func):
        raise _refused(func, pieces[0], "it needs the elements of other ranks")
    if str(func._schema.name).startswith("aten::_foreach_"):
        return _each(func, args, kwargs)
    region = _one_region(func, flat)
    local_args, local_kwargs = tree_unflatten([one.local if _is_piece(one) else one for one in flat], spec)
    local_kwargs.pop("memory_format", None)  # of the whole tensor; a part has none
    result = func(*local_args, **local_kwargs)
    if func._schema.is_mutable:
        return args[0]
    return tree_map(lambda one: type(pieces[0])(one, region) if isinstance(one, torch.Tensor) else one, result)


def _is_piece(one: object) -> bool:
    return hasattr(one, "region") and hasattr(one, "local")


def _elementwise(func: Any) -> bool:
    if func in _KEEP or torch.Tag.pointwise in func.tags:
        return True
    name = str(func._schema.name)
    return name.startswith("aten::_foreach_") and not any(word in name for word in _REDUCE)


def _one_region(func: Any, flat: Sequence[Any]) -> _core.Region:
    """Of all pieces; other tensors must be numbers."""
    pieces = [one for one in flat if _is_piece(one)]
    for one in flat:
        if _is_piece(one):
            if one.region != pieces[0].region:
                raise _refused(func, pieces[0], f"the other is {one.region}")
        elif isinstance(one, torch.Tensor) and one.numel() != 1:
            raise _refused(func, pieces[0], f"the other is a tensor of shape {tuple(one.shape)}")
    region: _core.Region = pieces[0].region
    return region


def _each(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A _foreach_ function, one tensor of each list after another: the lists may hold pieces and others."""
    lists = [
        one for one in args if isinstance(one, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in one)
    ]
    for together in zip(*lists, strict=True):
        if any(map(_is_piece, together)):
            _one_region(func, together)
    local = [[getattr(part, "local", part) for part in one] if isinstance(one, (list, tuple)) else one for one in args]
    result = func(*local, **kwargs)
    if result is None:
        return None
    return [type(one)(made, one.region) if _is_piece(one) else made for one, made in zip(lists[0], result, strict=True)]


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Between a piece and a tensor of the whole shape, where that says which elements are meant."""
    if _is_piece(target):
        if tuple(source.shape) == tuple(target.shape):
            gather.take(source, target.region, target.local)  # type: ignore[attr-defined]
            return target
        if source.numel() == 1:
            target.local.copy_(source.reshape(()))  # type: ignore[attr-defined]
            return target
        raise _refused(_aten.copy_.default, target, f"the other is a tensor of shape {tuple(source.shape)}")
    raise _refused(_aten.copy_.default, source, "a tensor of the whole shape would be filled in part")


def _new(func: Any, piece: Any, size: Sequence[int], **options: Any) -> torch.Tensor:
    """Of the same shape: the same part of a new tensor; of another: an ordinary tensor."""
    options = {name: value for name, value in options.items() if value is not None}
    options = {"dtype": piece.dtype, "device": piece.device, **options}
    if tuple(size) != tuple(piece.shape):
        other: torch.Tensor = _NEW[func](tuple(size), **options)
        return other
    part: torch.Tensor = type(piece)(_NEW[func](piece.local.numel(), **options), piece.region)
    return part


def _refused(func: Any, piece: Any, why: str) -> Exception:
    return unsupported(
        f"{func._schema.name.removeprefix('aten::')} of a Piece, "
        f"this rank's part of a tensor of shape {tuple(piece.shape)} ({piece.region}): {why}. "
        "Use .local, the elements held here, 1-D, or EMA.full_state_dict() for whole tensors"
    )
