"""Defines PartialTensor, a region of a global tensor, which torch.distributed.checkpoint saves, and loads at any world
size.

A DTensor cannot be this: torch takes its offsets from a helper that is wrong for uneven TP + FSDP2, and flat ranges
(FSDP1, a replica's part) have no placement. A region's boxes are chunks.

It is a tensor without storage, as DTensor is: torch's stagers then copy its attributes, and not memory of the global
shape, which does not exist.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils._pytree import tree_leaves

from shardow import _core, errors
from shardow.base.checks import unsupported, warn

_aten = torch.ops.aten
#: Operations whose result holds the same elements, which torch's stagers and checkpoints call.
_COPIES = {
    _aten.clone.default, _aten.detach.default, _aten.alias.default, _aten._to_copy.default, _aten.copy_.default,
    _aten.empty_like.default, _aten.zeros_like.default, _aten._pin_memory.default,
}  # fmt: skip


class PartialTensor(torch.Tensor):
    """This rank's part of a tensor; shape and size() are the whole tensor's.

    ``local``: the region.size elements held here, 1-D, in the region's order; ``region``: which they are.

    It copies, clones, detaches, and moves between devices and dtypes; torch.equal() compares. Everything else raises
    UnsupportedError: use ``local``. Pickling it warns: the file will hold a part.
    """

    local: torch.Tensor
    region: _core.Region
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, local: torch.Tensor, region: _core.Region) -> PartialTensor:
        tensor: PartialTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(region.shape), dtype=local.dtype, device=local.device
        )
        tensor.local, tensor.region = local, region
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Returns ``func`` of the local memory. Raises UnsupportedError for all but copies and torch.equal() of
        partial tensors."""
        options = {name: value for name, value in (kwargs or {}).items() if name != "memory_format"}  # of the whole
        if func is _aten.equal.default and all(isinstance(argument, PartialTensor) for argument in args):
            return args[0].region == args[1].region and torch.equal(args[0].local, args[1].local)
        if func is _aten.new_empty.default and tuple(args[1]) == tuple(args[0].shape):
            func, args = _aten.empty_like.default, args[:1]
        first: PartialTensor = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PartialTensor))
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        if func not in _COPIES or any(getattr(tensor, "region", None) != first.region for tensor in tensors):
            raise unsupported(
                f"{func._schema.name.removeprefix('aten::')} of a PartialTensor, this rank's part of a tensor of shape "
                f"{tuple(first.shape)} ({first.region}). It is copied and moved, and takes copies of the same region, "
                "nothing else. Use .local, the elements held here, 1-D, or EMA.full_state_dict() for whole tensors"
            )
        result = func(*(getattr(argument, "local", argument) for argument in args), **options)
        return first if func is _aten.copy_.default else PartialTensor(result, first.region)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # One text, so that a whole state warns once.
        warn(
            "what is being pickled is this rank's part of sharded averages, not the whole: pickled on rank 0 alone the "
            "other parts are lost. Use EMA.save(), torch.distributed.checkpoint, or full_state_dict() on all ranks; "
            "parts pickled on every rank load at the same world size and sharding only"
        )
        return _rebuild, (self.local, self.region.encode())

    def __deepcopy__(self, memo: dict[int, Any]) -> PartialTensor:
        memo[id(self)] = copied = PartialTensor(self.local.detach().clone(), self.region)
        return copied

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"PartialTensor({self.local.numel():,} of the {math.prod(self.region.shape):,} elements of {self.region}: "
            f"{self.local!r})"
        )

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(offsets, sizes) for offsets, sizes, _ in self.region.boxes()]

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(offsets, sizes), properties, torch.Size(self.region.shape)),
            )
            for offsets, sizes, _ in self.region.boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for offsets, sizes, begin in self.region.boxes():
            if index.offset is None or tuple(offsets) == tuple(index.offset):
                return self.local[begin : begin + math.prod(sizes)].view(sizes)
        raise errors.make("internal", f"{index.fqn}: no box at {index.offset} in {self.region}")


def _rebuild(local: torch.Tensor, encoded: bytes) -> PartialTensor:
    return PartialTensor(local, _core.Region.decode(encoded))


# For torch.load(weights_only=True); decode() takes nothing that encode() does not write.
torch.serialization.add_safe_globals([_rebuild])


def _chunk(offsets: list[int], sizes: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
