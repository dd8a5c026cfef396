"""region_of(): held to what fully_shard, parallelize_module and distribute_tensor really cut, on more ranks than there
are processes.

torch's "fake" backend gives one process any rank of any world; nothing is sent, so that only cuts that each rank makes
by itself (src_data_rank=None) are used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import debug as tensor_debug
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardow import _core
from shardow.sharding.dtensor import region_of, replicas_of


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # The caches hold meshes with the coordinates of the rank that made them; torch 2.6 lacks both caches.
        for cache in ("fast_path", "python"):
            getattr(tensor_debug, f"_clear_{cache}_sharding_prop_cache", lambda: None)()


def counted(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def indices(region: _core.Region) -> list[float]:
    return [float(i) for begin, _, length in region.runs() for i in range(begin, begin + length)]


MESHES = [((4, 2), ("dp", "tp")), ((2, 4), ("dp", "tp")), ((2, 2, 2), ("rep", "dp", "tp"))]


def _linear(rows: int, columns: int) -> nn.Module:
    linear = nn.Linear(columns, rows)
    with torch.no_grad():
        linear.weight.copy_(counted(rows, columns))
        linear.bias.copy_(counted(rows))
    return nn.Sequential(linear)


@pytest.mark.parametrize(("sizes", "names"), MESHES, ids=str)
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_tensor_parallel_under_fully_shard(style: Any, sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
    world = math.prod(sizes)
    for rows, columns in [(9, 5), (16, 8), (1, 3), (3, 1), (7, 10)]:
        parts: dict[str, list[_core.Region]] = {"weight": [], "bias": []}
        for rank in range(world):
            with fake_rank(rank, world):
                mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
                model = _linear(rows, columns)
                parallelize_module(model, mesh["tp"], {"0": style()}, src_data_rank=None)
                fully_shard(model, mesh=mesh["rep", "dp"] if "rep" in names else mesh["dp"])
                for name, p in model[0].named_parameters():
                    region = region_of(name, p)
                    assert indices(region) == p._local_tensor.flatten().tolist(), (
                        name,
                        rows,
                        columns,
                        rank,
                        p.placements,
                    )
                    # replicas_of() is no use: torch keeps meshes, whose fake groups are gone, between ranks.
                    for dim, placement in enumerate(p.placements):
                        if placement.is_replicate():
                            region = region.part(p.device_mesh.get_coordinate()[dim], p.device_mesh.size(dim), align=1)
                    parts[name].append(region)
        for name, regions in parts.items():
            assert _core.covers_once(regions), (name, rows, columns)


@pytest.mark.parametrize("shape", [(7,), (5, 3), (1, 4), (3, 0), (4, 3, 5)], ids=str)
def test_every_pair_of_placements(shape: tuple[int, ...]) -> None:
    choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    for placements in itertools.product(choices, repeat=2):
        for rank in range(6):
            with fake_rank(rank, 6):
                mesh = init_device_mesh("cpu", (3, 2))
                tensor = distribute_tensor(counted(*shape), mesh, list(placements), src_data_rank=None)
                assert indices(region_of("t", tensor)) == tensor._local_tensor.flatten().tolist(), (placements, rank)


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    with fake_rank(3, 4):
        mesh = DeviceMesh("cpu", [0, 1])
        for shape in [(4, 2), ()]:
            tensor = DTensor.from_local(
                torch.empty(0),
                mesh,
                [Replicate()],
                run_check=False,
                shape=torch.Size(shape),
                stride=counted(*shape).stride(),
            )
            assert region_of("t", tensor).size == 0
            assert replicas_of(tensor) == ()


def _stub(
    placements: list[Any], shape: tuple[int, ...], local: tuple[int, ...], counts: tuple[int, ...] = (2, 2)
) -> Any:
    mesh = SimpleNamespace(size=lambda dim: counts[dim], get_coordinate=lambda: [0] * len(counts))
    return SimpleNamespace(device_mesh=mesh, placements=placements, shape=shape, _local_tensor=torch.empty(local))


@pytest.mark.parametrize("rows", [16, 9])
def test_data_parallelism_over_two_dimensions_of_a_mesh_cuts_what_tensor_parallelism_left(rows: int) -> None:
    """torch makes one dimension of the two."""
    from torch.distributed.fsdp import DataParallelMeshDims

    parts = []
    for rank in range(12):
        with fake_rank(rank, 12):
            mesh = init_device_mesh("cpu", (2, 2, 3), mesh_dim_names=("a", "b", "tp"))
            weight = distribute_tensor(counted(rows, 5), mesh, [Replicate(), Replicate(), Shard(0)], src_data_rank=None)
            model = nn.ParameterDict({"w": nn.Parameter(weight)})
            fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("a", "b")))
            parts.append(region_of("w", model["w"]))
            assert indices(parts[-1]) == model["w"]._local_tensor.flatten().tolist(), (rank, model["w"].placements)
    assert _core.covers_once(parts)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (_stub([Partial(), Replicate()], (4,), (4,)), r"'w' has a partial placement"),
        (
            _stub([_StridedShard(0, split_factor=2), Shard(1)], (4, 4), (2, 2)),
            r"'w' has a strided shard of dimension 0 whose split factor",
        ),
        (_stub([Shard(0), Shard(1)], (4, 4), (2, 3)), r"'w' holds \[2, 3\] here, 6 elements"),
        (_stub([Shard(0), Replicate()], (4, 4), (4, 2)), r"'w' holds \[4, 2\] here, 8 elements"),
    ],
)
def test_what_placements_cannot_say_is_refused(tensor: Any, says: str) -> None:
    with pytest.raises(NotImplementedError, match=says):
        region_of("w", tensor)
