"""Piece: a region of a global tensor that torch.distributed.checkpoint saves and loads as it is, at any world size.

A DTensor cannot be this: torch takes its offsets from a helper that is wrong for uneven TP + FSDP2, and flat ranges (FSDP1, a replica's part) have no placement. A region's boxes are chunks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardow import _core, _errors


class Piece(torch.Tensor):
    """``local``: region.size elements, 1-D, in the region's order; size() is the global tensor's. It shares local's memory.

    It is a Tensor because torch's checkpointing fails for objects that are none; arithmetic on it acts on the 1-D local memory.
    """

    local: torch.Tensor
    region: _core.Region

    def __new__(cls, local: torch.Tensor, region: _core.Region) -> Piece:
        piece: Piece = torch.Tensor._make_subclass(cls, local)
        piece.local, piece.region = local, region
        return piece

    def size(self, dim: int | None = None) -> Any:
        shape = torch.Size(self.region.shape)
        return shape if dim is None else shape[dim]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.local, self.region.encode())

    def __deepcopy__(self, memo: dict[int, Any]) -> Piece:
        return Piece(self.local.clone(), self.region)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Piece({self.region}, {self.local.dtype})"

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
        raise _errors.make("internal", f"{index.fqn}: no box at {index.offset} in {self.region}")


def _rebuild(local: torch.Tensor, encoded: bytes) -> Piece:
    return Piece(local, _core.Region.decode(encoded))


torch.serialization.add_safe_globals([_rebuild])  # torch.load(weights_only=True); decode() takes nothing that encode() does not write


def _chunk(offsets: list[int], sizes: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
