"""wrap(): fully_shard on every block, and weights that only rank 0 had, bit for bit those of a model that every rank
had.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import ranks
import test_meta
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import shardow
from shardow.start.wrap import wrap


def mesh_of(kind: str) -> Any:
    world = dist.get_world_size()
    if kind == "hsdp":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (world,))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = []
    for step in range(5):
        loss = model(torch.arange(6) + step % 3).square().mean()
        found.append(loss.detach().clone())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def expected(kind: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model, mesh = test_meta.Model(), mesh_of(kind)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def wrapped(kind: str, efficient: bool) -> bool:
    reference, mesh = expected(kind), mesh_of(kind)
    # Other ranks' values must not matter.
    torch.manual_seed(1 if dist.get_rank() == 0 or not efficient else 77 + dist.get_rank())
    model = test_meta.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    returned = wrap(model, mesh, optimizer, memory_efficient_init=efficient)
    assert returned == (model, optimizer)
    assert [isinstance(layer, FSDPModule) for layer in model.layers] == [True, True]
    assert model.head.weight is model.embed.weight
    return all(torch.equal(a, b) for a, b in zip(train(model, optimizer), reference, strict=True))


@pytest.mark.parametrize(("kind", "world"), [("fsdp2", 1), ("fsdp2", 2), ("fsdp2", 3), ("hsdp", 4)])
@pytest.mark.parametrize("efficient", [True, False])
def test_training_is_that_of_a_model_which_every_rank_had(kind: str, world: int, efficient: bool) -> None:
    assert ranks.run(world, wrapped, kind, efficient) == [True] * world


def trained_before(_: object) -> bool:
    torch.manual_seed(1)
    plain, model = test_meta.Model(), test_meta.Model()
    model.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (plain, model)]
    train(plain, optimizers[0])
    train(model, optimizers[1])
    wrap(model, mesh_of("fsdp2"), optimizers[1])
    return all(torch.equal(a, b) for a, b in zip(train(model, optimizers[1]), train(plain, optimizers[0]), strict=True))


def test_an_optimizer_that_has_stepped_goes_on_with_its_state() -> None:
    """Both ranks have the same batch, so that the mean of their gradients is each one's."""
    assert ranks.run(2, trained_before, None) == [True, True]


def alive_when_filled(_: object) -> list[bool]:
    """Which of the whole weights are in memory when the shards are about to be filled."""
    model = test_meta.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    whole = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    alive: list[bool] = []

    def filled(*args: Any, **options: Any) -> object:
        gc.collect()
        alive.extend(storage() is not None for storage in whole)
        return shardow.materialize(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(wrap.__globals__, "materialize", filled)
        wrap(model, mesh_of("fsdp2"), optimizer)
    return alive


def test_an_optimizer_keeps_no_whole_weights_on_ranks_that_are_sent_theirs() -> None:
    first, second = ranks.run(2, alive_when_filled, None)
    assert all(first)
    assert not any(second)


def with_a_layer_that_was_sharded(kind: str) -> bool:
    reference, mesh = expected(kind), mesh_of(kind)
    torch.manual_seed(1)
    model = test_meta.Model()
    fully_shard(model.layers[0], mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrap(model, mesh, optimizer)
    return all(torch.equal(a, b) for a, b in zip(train(model, optimizer), reference, strict=True))


def test_what_is_sharded_already_stays_as_it_is() -> None:
    assert ranks.run(2, with_a_layer_that_was_sharded, "fsdp2") == [True, True]


def nested_and_repeated(_: object) -> list[str]:
    mesh, told = mesh_of("fsdp2"), []
    block = nn.Linear(4, 4)
    repeated = nn.Sequential(block, nn.ReLU(), block)
    wrap(repeated, mesh)
    assert isinstance(block, FSDPModule)
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    wrap(nested, mesh, units=lambda name, module: True)
    assert all(isinstance(module, FSDPModule) for module in nested.modules())
    assert torch.equal(nested(torch.ones(4)), nested[1](nested[0](torch.ones(4))))
    with shardow.meta_init():
        on_meta = nn.Linear(2, 2)
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for model, options in (
        (on_meta, {"memory_efficient_init": False, "mesh": mesh}),
        (whole, {"mesh": init_device_mesh("cpu", (1, 1, 1))}),
    ):
        with pytest.raises(ValueError, match="wrap") as error:
            wrap(model, **{"units": (), **options})
        told.append(str(error.value))
    assert not any(p.is_meta for p in whole.parameters())
    return told


def test_a_block_used_twice_blocks_in_blocks_and_what_can_not_be_wrapped() -> None:
    for told in ranks.run(1, nested_and_repeated, None):
        assert "have no values on rank 0; give a source" in told[0]
        assert "the mesh has 3 dimensions" in told[1]


def meta_and_units(path: str) -> list[str]:
    mesh = mesh_of("fsdp2")
    told = []
    with shardow.meta_init():
        model = test_meta.Model()
    for options in ({}, {"units": ["Nothing"]}, {"units": [nn.Linear]}):
        with pytest.raises((ValueError, ConnectionError)) as error:
            wrap(model, mesh, **options, timeout=30)  # type: ignore[arg-type]
        told.append(str(error.value))
    with shardow.meta_init():
        model = test_meta.Model()
    wrap(model, mesh, units=lambda name, module: name.startswith("layers."), source=path)
    assert torch.equal(model.layers[0].weight.full_tensor(), shardow.open(path)["layers.0.weight"])
    return told


def test_a_model_on_meta_wants_a_source(tmp_path: Any) -> None:
    shardow.save(test_meta.Model(), tmp_path / "a.safetensors")
    for told in ranks.run(1, meta_and_units, str(tmp_path / "a.safetensors")):
        assert "have no values on rank 0; give a source" in told[0]
        assert "units=['Nothing']" in told[1]
        assert "'head.weight' is the same tensor as 'embed.weight', in another unit" in told[2]


class Steps(nn.Module):
    """Blocks that torch can't shard by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([nn.ModuleDict({"inner": nn.Linear(4, 4)}) for _ in range(2)])


def containers() -> str:
    mesh = mesh_of("fsdp2")
    torch.manual_seed(1)
    model = Steps()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="has no forward") as error:
        wrap(model, mesh, units=[nn.ModuleDict])
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in state.items())
    wrap(model, mesh)
    assert all(torch.equal(model.get_parameter(name).full_tensor(), tensor) for name, tensor in state.items())
    return str(error.value)


def test_containers_are_no_units_and_asking_for_them_leaves_the_weights_where_they_are() -> None:
    for told in ranks.run(2, containers):
        assert "a ModuleDict has no forward()" in told
