"""From a DTensor to the region of the global tensor that this rank holds: what placements mean is the engine's to say.
The engine's rule was compared with what ``fully_shard`` and ``distribute_tensor`` really cut; torch's own helper is
wrong for uneven TP + ``fully_shard``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shardow import _core
from shardow.base.checks import unsupported

if TYPE_CHECKING:
    import torch.distributed as dist


def region_of(name: str, tensor: Any) -> _core.Region:
    """The region of DTensor ``tensor`` on this rank, checked against its local tensor. ``name`` is for messages."""
    mesh, me = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if me is None:  # this rank is outside the tensor's mesh
        return _core.Region.whole(tensor.shape).window(0, 0)
    sizes = [(mesh.size(mesh_dim), place) for mesh_dim, place in enumerate(me)]
    region = _core.region_of(name, tensor.shape, sizes, list(map(_placement, tensor.placements)))
    held = tuple(tensor._local_tensor.shape)  # the public to_local() makes a view each time, with a grad_fn
    # An empty shard may be (0, 0) where (1, 0) is expected.
    if math.prod(held) != region.size or (region.size and held != region.grid_shape):
        there = f"{list(held)} here, {math.prod(held)} elements"
        raise unsupported(f"'{name}' holds {there}, where its placements {tensor.placements} say {region}")
    return region


def _placement(placement: Any) -> _core.Placement:
    if placement.is_replicate():
        return _core.Placement.replicate()
    if not hasattr(placement, "dim"):
        return _core.Placement.partial()
    return _core.Placement.shard(placement.dim, getattr(placement, "split_factor", 1))


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
