"""Derives the form in which transformers' save_pretrained() writes a model: its names, and its tensors where they are
not the module's, such as experts that the module has in one tensor. Parts of the module's tensors become parts of the
file's in the same memory, for loading and for saving.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from shardow import _core
from shardow.base.checks import unsupported
from shardow.distributed.gather import LocalShard
from shardow.sharding.names import unwrapped, walk
from shardow.sharding.storage import storage_key
from shardow.sharding.view import ModelView


class _Block(NamedTuple):
    """A box of the file's tensor ``key`` that is a box of one of the module's tensors. ``dims``: the module's dimension
    for each of the file's; None where the box has one element.
    """

    key: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]  # in the file's tensor
    sizes: tuple[int, ...]
    start: tuple[int, ...]  # in the module's tensor
    dims: tuple[int | None, ...]

    def pieces(self, part: LocalShard, offsets: Sequence[int], sizes: Sequence[int], at: int) -> Iterator[LocalShard]:
        """Yields the overlap of this box and a box of ``part``, whose memory begins with element ``at``, run by run."""
        axes = {dim: axis for axis, dim in enumerate(self.dims) if dim is not None}
        each = range(len(offsets))
        lengths = [self.sizes[axes[dim]] if dim in axes else 1 for dim in each]
        low = [max(offsets[dim], self.start[dim]) for dim in each]
        counts = [min(offsets[dim] + sizes[dim], self.start[dim] + lengths[dim]) - low[dim] for dim in each]
        if any(count <= 0 for count in counts):
            return
        outer = max((dim for dim in each if counts[dim] != sizes[dim]), default=0)  # memory has a gap between these
        for index in itertools.product(*map(range, counts[:outer])):
            first = [low[dim] + (index[dim] if dim < outer else 0) for dim in each]
            run = [1 if dim < outer else counts[dim] for dim in each]
            memory = at + sum((first[dim] - offsets[dim]) * math.prod(sizes[dim + 1 :]) for dim in each)
            window = [[(begin, begin + 1)] for begin in self.begin]
            for dim, axis in axes.items():
                begin = self.begin[axis] + first[dim] - self.start[dim]
                window[axis] = [(begin, begin + run[dim])]
            region = _core.Region.grid(self.shape, window)
            yield LocalShard(self.key, part.flat[memory : memory + math.prod(run)], region)


class SavedForm(NamedTuple):
    """``owners``: {key in the file: names of the module's tensors of which it is made}; ``refused``: keys that are not
    made of boxes of the module's tensors.
    """

    owners: dict[str, list[str]]
    blocks: dict[str, list[_Block]]  # by the module's tensor
    refused: list[str]

    def parts(self, parts: Iterable[LocalShard]) -> list[LocalShard]:
        """Returns parts of the file's tensors in the memory of parts of the module's. Raises NotImplementedError."""
        if self.refused:
            raise unsupported(
                f"'{self.refused[0]}' of save_pretrained() has the module's elements in another order, and is not read "
                "or written by parts. Load it with from_pretrained(), or write it with shardow.save() or EMA.export()"
            )
        converted: list[LocalShard] = []
        for part in parts:
            for block in self.blocks[part.name]:
                no_elements = LocalShard(block.key, part.flat[:0], _core.Region.whole(block.shape).window(0, 0))
                pieces = [piece for box in part.region.boxes() for piece in block.pieces(part, *box)]
                converted += pieces or [no_elements]  # every rank names every tensor
        return converted


def saved_form(view: ModelView | None) -> SavedForm | None:
    """Returns the form of a model of transformers; None for others, and where save_pretrained() changes nothing."""
    loading: Any = sys.modules.get("transformers.core_model_loading")  # imported with every model since version 5
    if view is None or loading is None:
        return None
    model = unwrapped(view.model)
    if all(cls.__name__ != "PreTrainedModel" for cls in type(model).__mro__):
        return None
    tracer, named = _Tracer(), {}
    for local in [*view.parameters, *view.buffers]:
        own = torch.empty(list(local.region.shape), dtype=local.tensor.dtype, device="meta")
        named[local.name], tracer.named[storage_key(own)] = own, (local.name, own)
    with tracer:
        written = loading.revert_weight_conversion(_as_built(model), dict(named))
    if written.keys() == named.keys():
        return None
    form = SavedForm({key: [] for key in written}, {name: [] for name in named}, [])
    for key, tensor in written.items():
        try:
            for name, block in [*tracer.blocks(key, tensor)]:
                form.blocks[name].append(block)
                form.owners[key].append(name)
        except LookupError:
            form.refused.append(key)
    return form


def _as_built(model: nn.Module) -> Any:
    """Returns a shell of the model whose modules have the names and classes that they had before they were sharded."""
    shells: list[tuple[str, nn.Module]] = []
    for name, module in walk(model):
        cls: Any = next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))
        shells.append((name, cls.__new__(cls)))
        shells[-1][1].__dict__.update(vars(module))
    shells[0][1].__dict__["named_modules"] = lambda: iter(shells)
    return shells[0][1]


class _Tracer(TorchDispatchMode):
    """Keeps results on meta views of the ``named`` tensors; records which are joined, along which dimension."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.named: dict[int, tuple[str, torch.Tensor]] = {}  # by memory
        self._joined: dict[int, tuple[torch.Tensor, list[torch.Tensor], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        if func is torch.ops.aten._unsafe_view.default:  # a reshape that copies: no view of a named tensor
            return torch.empty(args[1], device="meta")
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default:
            self._joined[storage_key(result)] = (result, args[0], args[1] if len(args) > 1 else 0)
        return result

    def blocks(self, key: str, tensor: torch.Tensor) -> Iterator[tuple[str, _Block]]:
        """Yields (name, block) of each box that makes up the file's ``key``. Raises LookupError where no boxes do."""
        result, sources, along = self._joined.get(storage_key(tensor), (tensor, [tensor], 0))
        if (result.shape, result.stride()) != (tensor.shape, tensor.stride()):
            raise LookupError
        begin = [0] * tensor.dim()
        for source in sources:
            name, own = self.named[storage_key(source)]
            yield name, _Block(key, tuple(tensor.shape), tuple(begin), tuple(source.shape), *_axes(source, own))
            if len(sources) > 1:
                begin[along] += source.shape[along]


def _axes(box: torch.Tensor, whole: torch.Tensor) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """Returns the index in ``whole`` where its view ``box`` begins, and the dimension of ``whole`` for each of the
    view's. Raises LookupError where the view is no box, or has its dimensions in another order.
    """
    start, rest, known = list[int](), int(box.storage_offset()), dict[int, int]()
    for dim, (size, stride) in enumerate(zip(whole.shape, whole.stride(), strict=True)):
        index, rest = divmod(rest, stride) if size > 1 else (0, rest)
        start.append(index)
        known |= {stride: dim} if size > 1 else {}
    dims = [known[stride] if size > 1 else None for size, stride in zip(box.shape, box.stride(), strict=True)]
    ends = [(dim, start[dim] + size) for dim, size in zip(dims, box.shape, strict=True) if dim is not None]
    if ends != sorted(ends) or any(end > whole.shape[dim] for dim, end in ends):
        raise LookupError
    return tuple(start), tuple(dims)
