"""Averages as the tensors that torch and an origin's users expect: DTensors like the weights where these say everything, whole tensors where they are whole, else pieces."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardow import _core
from shardow.model.dtensor import sharded_like
from shardow.model.piece import Piece
from shardow.model.view import ModelView


def weights_of(view: ModelView) -> dict[str, torch.Tensor]:
    """The modules' own parameters and buffers, by the names of view.parameters and view.buffers. FSDP1's have none."""
    return {one.local.name: one.slot.recorded for one in [*view._found, *view._found_buffers] if not one.tied}


def look(weight: torch.Tensor | None, memory: torch.Tensor, region: _core.Region) -> torch.Tensor:
    """``memory``: the elements of ``region``, in its order. The result shares it. ``weight``: what it is to look like."""
    if isinstance(weight, DTensor) and weight._local_tensor.numel() == region.size and _torch_says(weight, region):
        return sharded_like(weight, memory.view(weight._local_tensor.shape))
    if region == _core.Region.whole(list(region.shape)):
        return memory.view(region.shape)
    return Piece(memory.reshape(-1), region)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """The same look on memory of its own."""
    if isinstance(tensor, DTensor):
        return sharded_like(tensor, tensor._local_tensor.detach().clone())
    return copy.deepcopy(tensor) if isinstance(tensor, Piece) else tensor.detach().clone()


def _torch_says(tensor: Any, region: _core.Region) -> bool:
    """Torch's own idea of what this rank holds, which checkpoints go by, is right: for uneven TP + FSDP2 not every version's is."""
    chunks = [(list(chunk.offsets), list(chunk.sizes)) for chunk in tensor.__create_chunk_list__() if chunk.sizes.numel()]
    return chunks == [(list(offsets), list(sizes)) for offsets, sizes, _ in region.boxes()] and (bool(chunks) or region.size == 0)
