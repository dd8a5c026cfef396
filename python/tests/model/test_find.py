"""find(): on any ranks, however a model is shared, every parameter is found under its plain name.

Each element is there once, where the region says.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import ranks
import torch
import torch.distributed as dist
import zoo
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import shardow
from shardow import _core
from shardow.sharding.local import LocalTensor
from shardow.sharding.view import ModelView, find

ANY = ["ddp", "fsdp1", "fsdp1-flat", "fsdp1-grad-op", "fsdp1-no-shard", "fsdp2"]
CASES = [
    *((kind, world) for kind in ANY for world in (1, 2, 3, 4)), ("plain", 2), ("tp", 2), ("tp", 3), ("tp", 4),
    ("mixed", 2), ("mixed", 3), ("fsdp1-no-shard-flat", 2), ("wrapped-ddp", 2), ("wrapped-fsdp1", 3),
    ("wrapped-fsdp2", 3), ("fsdp1-hybrid", 4), ("fsdp1-hybrid-flat", 4), ("hsdp", 2), ("hsdp", 4), ("tp+fsdp2", 4),
]  # fmt: skip

#: name -> (aliases, this rank's part after replicas have divided it, whether anything is divided)
Found = dict[str, tuple[tuple[str, ...], bytes, bool]]


def divided(local: LocalTensor) -> _core.Region:
    region = local.region
    for _, index, count in local.replicas:
        region = region.part(index, count, align=2)
    return region


def values_in(full: torch.Tensor, region: _core.Region) -> torch.Tensor:
    flat = full.detach().reshape(-1)
    return torch.cat([flat[begin : begin + length] for begin, _, length in region.runs()] or [flat[:0]])


def check_locals(found: list[LocalTensor], full: dict[str, torch.Tensor]) -> None:
    for local in found:
        expected = full[local.name]
        assert type(local.tensor) is torch.Tensor
        assert not local.tensor.requires_grad
        assert local.tensor.is_contiguous()
        assert local.tensor.dtype == expected.dtype
        assert tuple(local.region.shape) == tuple(expected.shape)
        assert torch.equal(local.tensor.view(-1), values_in(expected, local.region)), local.name
        assert local.requires_grad == expected.requires_grad


def ranks_of(view: ModelView) -> list[int]:
    """The global ranks that share the model."""
    return [dist.get_rank()] if view.process_group is None else dist.get_process_group_ranks(view.process_group)


def look(kind: str) -> list[Found]:
    reports = []
    for name in zoo.models_for(kind):
        twin = zoo.build(name)
        model = zoo.PARALLEL[kind](zoo.build(name), dist.get_world_size())
        view = find(model)
        check_locals(view.parameters, dict(twin.named_parameters()))
        check_locals(view.buffers, dict(twin.named_buffers()))
        assert [local.name for local in view.parameters] == [plain for plain, _ in twin.named_parameters()]
        assert [local.name for local in view.buffers] == [plain for plain, _ in twin.named_buffers()]
        assert not any(local.replicas for local in view.buffers)
        assert view.unchanged()
        shared = any(local.sharded for local in view.parameters)
        assert shared or kind == "plain" or dist.get_world_size() == 1
        assert ranks_of(view) == (list(range(dist.get_world_size())) if shared else [dist.get_rank()])
        reports.append(
            {local.name: (local.aliases, divided(local).encode(), local.sharded) for local in view.parameters}
        )
    return reports


@pytest.mark.parametrize(("kind", "world"), CASES)
def test_each_element_is_found_once_under_its_plain_name(kind: str, world: int) -> None:
    by_rank = ranks.run(world, look, kind)
    for i, name in enumerate(zoo.models_for(kind)):
        twin = zoo.build(name)
        every = list(twin.named_parameters(remove_duplicate=False))
        for plain, p in twin.named_parameters():
            aliases = tuple(other for other, q in every if q is p and other != plain)
            assert all(found[i][plain][0] == aliases for found in by_rank), plain
            held = [found[i][plain][1] for found in by_rank]
            # The plan leaves out what is sharded over dp; nothing shows that tp's ranks hold it alike.
            if kind == "tp+fsdp2":
                held = list(dict.fromkeys(held))
            regions = [_core.Region.decode(region) for region in held]
            if all(found[i][plain][2] for found in by_rank):
                assert _core.covers_once(regions), (name, plain, regions)
            else:
                assert regions == [_core.Region.whole(list(p.shape))] * world, (name, plain)


def test_a_users_own_module_named_module_keeps_its_name() -> None:
    assert "module.weight" in [local.name for local in find(zoo.build("tied")).parameters]


def test_data_parallel_adds_nothing_to_names() -> None:
    assert [local.name for local in find(nn.DataParallel(nn.Linear(2, 2))).parameters] == ["weight", "bias"]


def test_parameters_on_the_same_memory_are_one() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    for other in model[1:]:
        other.weight.data = model[0].weight.data
    view = find(model)
    assert next((local.name, local.aliases) for local in view.parameters) == ("0.weight", ("1.weight", "2.weight"))
    assert [local.name for local in view.parameters] == ["0.weight", "0.bias", "1.bias", "2.bias"]


def test_parameters_that_share_a_part_of_their_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(3, 2, bias=False))
    model[1].weight.data = model[0].weight.data[1:3]
    with pytest.raises(NotImplementedError, match=r"'0\.weight' and '1\.weight' share"):
        find(model)


def _sparse() -> nn.Module:
    model = nn.Module()
    model.table = nn.Parameter(torch.eye(3).to_sparse())
    return model


def _memoryless() -> nn.Module:
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Module()
    model.table = nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3, device="meta")), r"meta.*: 1\.weight, 1\.bias;"),
        (lambda: nn.Sequential(*[nn.Linear(1, 1, device="meta") for _ in range(6)]), r"3\.bias and 4 more"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), r"not initialised.*0\.weight"),
        (_sparse, "'table'.*sparse_coo"),
        (_memoryless, "'table' is a TwoTensor"),
        (lambda: torch.ones(3), "is a Tensor; it must be of class Module"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "the model is a RecursiveScriptModule of torch.jit"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))), "'0' is a RecursiveScriptModule of torch.jit"),
    ],
)
def test_what_cannot_be_averaged_is_named(model: object, says: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=says):
        find(model())  # type: ignore[operator]


# ---- memory


def test_views_show_the_memory_that_there_was_whatever_the_parameters_show_by_then() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    first, then = model[0].weight.detach(), model[0].weight.detach().clone()
    alive = weakref.ref(model[1].bias.untyped_storage())
    address = model[1].bias.data_ptr()
    whole = torch.arange(40.0)
    model[1].weight.data = whole[8:24].view(4, 4)
    view = find(model)
    model[0].weight.data = torch.zeros(4, 3, dtype=torch.float64)
    model[1].weight.data = torch.zeros(2, 8)
    model[1].bias.data = torch.zeros(4)
    gc.collect()
    there = {one.name: one.tensor for one in view.parameters}
    assert there["0.weight"].data_ptr() == first.data_ptr()
    assert torch.equal(there["0.weight"], then)
    assert there["1.weight"].data_ptr() == whole[8:].data_ptr()
    assert torch.equal(there["1.weight"], whole[8:24].view(4, 4))
    assert there["1.bias"].data_ptr() == address
    assert alive() is not None
    assert not view.unchanged()


def test_averages_follow_weights_that_moved() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    ema = shardow.EMA(model, 0.5)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = p.data.clone() + 1
    ema.update()
    for name, average in ema.state_dict()["averages"].items():
        assert torch.equal(average, torch.lerp(expected[name], expected[name] + 1, 0.5)), name
    with ema.swapped():
        for name, p in model.named_parameters():
            assert torch.equal(p, torch.lerp(expected[name], expected[name] + 1, 0.5)), name
    for name, p in model.named_parameters():
        assert torch.equal(p, expected[name] + 1), name


def test_a_move_that_could_not_be_followed_is_followed_by_the_next_call() -> None:
    model = nn.Linear(3, 4)
    view = find(model)
    model.weight.data = model.weight.data.clone()
    calls: list[str] = []

    def fails() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        view.follow_moves(fails)
    assert not view.unchanged()
    assert view.follow_moves(lambda: calls.append("bind")) is None
    assert calls
    assert view.unchanged()


def test_a_view_is_in_memory_that_a_storage_has_moved_to() -> None:
    model = nn.Linear(3, 4)
    whole = torch.arange(40.0)
    model.weight.data = whole[8:20].view(4, 3)
    view = find(model)
    model.share_memory()
    there = {one.name: one.tensor for one in view.parameters}
    assert all(there[name].data_ptr() == p.data_ptr() for name, p in model.named_parameters())
    assert torch.equal(there["weight"], torch.arange(8.0, 20.0).view(4, 3))


# ---- groups


def groups_of_a_part() -> None:
    """Ranks 0 and 1 share one model, rank 2 is alone."""
    pair = dist.new_group([0, 1])
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    if dist.get_rank() == 2:
        assert find(model).process_group is None
        assert ranks_of(find(model)) == [2]
        return
    model[1] = DistributedDataParallel(model[1], process_group=pair)
    view = find(model)
    assert view.process_group is pair
    assert ranks_of(view) == [0, 1]
    assert [bool(local.replicas) for local in view.parameters] == [False, False, True, True], (
        "only what DDP has is a replica"
    )


def test_ddp_around_a_part_speaks_for_that_part_alone() -> None:
    ranks.run(3, groups_of_a_part)


def given_groups() -> None:
    me = dist.get_rank()
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][me // 2]
    plain = nn.Linear(8, 8)
    assert find(plain).process_group is None
    assert find(plain).parameters[0].replicas == ()
    view = find(plain, group=half)
    assert [(index, count) for _, index, count in view.parameters[0].replicas] == [(me % 2, 2)]
    assert ranks_of(view) == [me // 2 * 2, me // 2 * 2 + 1]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    sharded = fully_shard(nn.Linear(8, 8), mesh=mesh["b"])
    assert ranks_of(find(sharded)) == ranks_of(view)
    try:
        find(fully_shard(nn.Linear(8, 8), mesh=mesh["a"]), group=half)
    except ValueError as error:
        assert f"group= lacks [{2 + me % 2 if me < 2 else me % 2}]" in str(error), error
    else:
        raise AssertionError("a group without some of the model's ranks was taken")


def test_a_group_is_taken_if_it_has_all_of_the_models_ranks() -> None:
    ranks.run(4, given_groups)


def needs_a_group() -> None:
    """Two meshes of half the ranks each, whose union no group is known for."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    three = dist.new_group([0, 1, 2])
    for child, row in zip(model, ([0, 1], [1, 2]), strict=True):
        mesh = DeviceMesh("cpu", row)
        if mesh.get_coordinate() is not None:
            fully_shard(child, mesh=mesh)
    if dist.get_rank() == 1:
        try:
            find(model)
        except ValueError as error:
            assert "ranks [0, 1, 2]" in str(error)
            assert "group=" in str(error)
        else:
            raise AssertionError("no group is known")
        assert ranks_of(find(model, group=three)) == [0, 1, 2]


def test_without_a_known_group_one_is_asked_for() -> None:
    ranks.run(4, needs_a_group)


def ignored_by_ddp() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    view = find(DistributedDataParallel(model))
    assert [bool(local.replicas) for local in view.parameters] == [False, True, True, True]


def test_what_ddp_ignores_is_no_replica() -> None:
    ranks.run(2, ignored_by_ddp)


# ---- DTensors that no wrapper made


def loose_dtensors() -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model = nn.Module()
    full = torch.arange(7 * 8.0).view(7, 8)
    model.cut = nn.Parameter(distribute_tensor(full, mesh, [Shard(1)]))
    model.same = nn.Parameter(distribute_tensor(full, mesh, [Replicate()]))
    model.scalar = nn.Parameter(distribute_tensor(torch.tensor(3.0), mesh, [Replicate()]))
    model.register_buffer("table", distribute_tensor(full, mesh, [Shard(0)]))
    view = find(model)
    for local in [*view.parameters, *view.buffers]:
        assert torch.equal(
            local.tensor.reshape(-1), values_in(full if local.name != "scalar" else torch.tensor(3.0), local.region)
        ), local.name
    assert [len(local.replicas) for local in view.parameters] == [0, 1, 1]
    assert [local.name for local in view.buffers] == ["table"]
    assert view.unchanged()


def test_loose_dtensors_and_dtensor_buffers_are_found() -> None:
    ranks.run(2, loose_dtensors)
