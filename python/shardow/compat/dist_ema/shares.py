"""Shares: who averages which elements of which parameter, where parameters lie one after another, cut into equal
stretches, one a rank, whatever their strides.

A parameter whose memory has another order than its dimensions (channels_last) is cut in the order of its memory. Its
share is no region of it then, but one of the tensor with its dimensions in that order; files, which know regions of the
tensor itself, get its boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardow import _core
from shardow.averages.tracked import divide
from shardow.base.checks import unsupported
from shardow.distributed.gather import Part
from shardow.model.local import LocalTensor
from shardow.model.match import compare
from shardow.model.owners import has_fsdp
from shardow.model.view import ModelView
from shardow.model.zero3 import is_partitioned


@dataclass(eq=False)
class Share:
    """Elements [begin, begin + region.size) of what this rank holds of a parameter, in the order of memory. ``order``:
    its dimensions, the slowest in memory first; ``region`` is of a tensor with these."""

    local: LocalTensor
    order: tuple[int, ...]
    region: _core.Region
    begin: int
    average: torch.Tensor  # 1-D, region.size

    @property
    def name(self) -> str:
        return self.local.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return tuple(self.local.region.shape)

    def source(self, local: LocalTensor | None = None) -> torch.Tensor:
        """The live elements, 1-D, a view; of ``local``, which is the same parameter of another view."""
        return _memory(local or self.local, self.order)[self.begin : self.begin + self.region.size]

    @property
    def inverse(self) -> list[int]:
        """For permute(): gives the dimensions as the parameter has them."""
        return sorted(range(len(self.order)), key=self.order.__getitem__)

    def parts(self, copied: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[Part]:
        """The average as regions of the parameter: its own memory, or copies, which are noted: (a stretch of the
        average as its tensor goes, the copy, row-major)."""
        plain = self.order == tuple(range(len(self.order)))
        if plain or not self.region.size:
            yield Part(self.name, self.average, self.region if plain else _core.Region.whole(self.shape).window(0, 0))
            return
        for offsets, sizes, begin in self.region.boxes():
            stretch = self.average[begin : begin + math.prod(sizes)].view(sizes).permute(self.inverse)
            copied.append((stretch, stretch.contiguous()))
            box = _core.Region.grid(self.shape, [[(offsets[d], offsets[d] + sizes[d])] for d in self.inverse])
            yield Part(self.name, copied[-1][1].view(-1), box)


def shares(view: ModelView, world: int, rank: int, dtype: torch.dtype, sharded: bool) -> list[Share]:
    """One of each parameter, empty ones too, whose averages equal the weights. ``sharded``: what a rank holds, which
    replicas divide.
    """
    if (odd := [one for one in view.parameters if one.tensor.is_complex()]) != []:
        raise unsupported(f"'{odd[0].name}' is {odd[0].tensor.dtype}; averages of complex numbers are not kept here")
    made, total, at = [], sum(one.region.size for one in view.parameters), 0
    each = -(-total // world)
    first, end = min(rank * each, total), min((rank + 1) * each, total)
    for local in view.parameters:
        if sharded:
            region, begin = divide(local, "split")
            order = tuple(range(len(region.shape)))
        else:
            order, size = _memory_order(local), local.region.size
            begin, stop = min(max(first - at, 0), size), min(max(end - at, 0), size)
            region = _core.Region.whole([local.region.shape[d] for d in order]).window(begin, stop)
            at += size
        average = _memory(local, order)[begin : begin + region.size].to(dtype, copy=True)
        made.append(Share(local, order, region, begin, average))
    return made


class _Layout(NamedTuple):
    """What an average shares with its weight: the elements of a rank, and the order of dimensions in memory."""

    region: _core.Region
    order: tuple[int, ...]

    @property
    def shape(self) -> list[int]:
        return list(self.region.shape)

    def __str__(self) -> str:
        return f"{self.region} in the order {self.order}"


def refuse_unlike(made: Sequence[Share], view: ModelView) -> None:
    """Raises KeyError where a model is not as the one that shares were made of."""
    were = {share.name: _Layout(share.local.region, share.order) for share in made}
    found = compare(were, {one.name: _Layout(one.region, _memory_order(one)) for one in view.parameters})
    found.refuse(
        "update()", "the model", KeyError, here="in the averages", done="nothing was averaged",
        hint="The averages were made of another model; make a DistEMA of this one",
    )  # fmt: skip


def is_sharded(model: nn.Module) -> bool:
    """The same on every rank, whatever each of them holds."""
    return has_fsdp(model) or any(isinstance(p, DTensor) or is_partitioned(p) for p in model.parameters())


def _memory_order(local: LocalTensor) -> tuple[int, ...]:
    """The dimensions of a whole tensor, the slowest in memory first; those of a shard as they are. Raises where there
    are holes.
    """
    tensor, plain = local.tensor, tuple(range(len(local.region.shape)))
    if tensor.is_contiguous() or tensor.dim() != len(plain):  # a flat shard
        return plain
    strides = tensor.stride()
    order = tuple(sorted(plain, key=lambda d: -strides[d]))
    if tuple(tensor.shape) != tuple(local.region.shape) or not tensor.permute(order).is_contiguous():
        raise unsupported(
            f"'{local.name}' of shape {tuple(tensor.shape)} and strides {tensor.stride()} has holes in its memory; "
            "make it contiguous first"
        )
    return order


def _memory(local: LocalTensor, order: tuple[int, ...]) -> torch.Tensor:
    """1-D, a view."""
    return local.tensor.view(-1) if local.tensor.is_contiguous() else local.tensor.permute(order).view(-1)
