"""From a DTensor to the region of the global tensor that this rank holds.

torch's own helper is wrong for uneven TP + ``fully_shard``; the rule here was compared with what ``fully_shard`` and ``distribute_tensor``
really cut: mesh dimensions apply left to right, except that a strided shard waits for the later mesh dimensions that cut the same tensor
dimension.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shardow import _core
from shardow.base.checks import unsupported

if TYPE_CHECKING:
    import torch.distributed as dist

Pairs = list[tuple[int, int]]  # (begin, end)


def cut(runs: Pairs, count: int, index: int) -> Pairs:
    """Part ``index`` of torch.chunk(count) of the elements in ``runs``."""
    total = sum(end - begin for begin, end in runs)
    each = -(-total // count)
    low, high = min(total, each * index), min(total, each * (index + 1))
    at, part = 0, []
    for begin, end in runs:
        first, last = max(low - at, 0), min(high - at, end - begin)
        if first < last:
            part.append((begin + first, begin + last))
        at += end - begin
    return part


def region_of(name: str, tensor: Any) -> _core.Region:
    """The region of DTensor ``tensor`` on this rank, checked against its local tensor. ``name`` is for messages."""
    if tensor.device_mesh.get_coordinate() is None:  # this rank is outside the tensor's mesh
        return _core.Region.whole(list(tensor.shape)).window(0, 0)
    dims = _intervals(name, tensor)
    region = _core.Region.grid(list(tensor.shape), dims)
    held = tuple(tensor._local_tensor.shape)  # the public to_local() makes a view each time, with a grad_fn
    said = tuple(sum(end - begin for begin, end in dim) for dim in dims)
    if math.prod(held) != region.size or (region.size and held != said):  # an empty shard may be (0, 0) where (1, 0) is said
        raise unsupported(
            f"'{name}' holds {list(held)} here, {math.prod(held)} elements, where its placements {tensor.placements} say {region}"
        )
    return region


def _intervals(name: str, tensor: Any) -> list[Pairs]:
    mesh, me = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    dims: list[Pairs] = [[(0, size)] if size else [] for size in tensor.shape]
    late: list[list[int]] = []  # strided shards: [mesh dim, tensor dim, factor left]

    def apply(mesh_dim: int, dim: int) -> None:
        count = mesh.size(mesh_dim)
        dims[dim] = cut(dims[dim], count, me[mesh_dim])
        for waiting in late:
            if waiting[1] == dim:
                waiting[2] //= count

    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim"):
            raise unsupported(f"'{name}' has placement {placement}, which no weight has; average it when it is reduced")
        factor = getattr(placement, "split_factor", 1)
        if factor > 1:
            late.append([mesh_dim, placement.dim, factor])
        else:
            apply(mesh_dim, placement.dim)
        while done := [waiting for waiting in late if waiting[2] == 1]:
            late.remove(done[0])
            apply(done[0][0], done[0][1])
    if late:
        raise unsupported(f"'{name}' has placements {tensor.placements}, which only views of sharded tensors have")
    return dims


def replicas_of(tensor: Any) -> tuple[tuple[dist.ProcessGroup, int, int], ...]:
    """(process group, this rank's index, size) of each mesh dimension that only replicates."""
    mesh, me = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if me is None:
        return ()
    return tuple(
        (mesh.get_group(mesh_dim), me[mesh_dim], mesh.size(mesh_dim))
        for mesh_dim, placement in enumerate(tensor.placements)
        if placement.is_replicate() and mesh.size(mesh_dim) > 1
    )
