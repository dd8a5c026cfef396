"""Models that get their weights after they were built: what people really train, against the same models built whole,
bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from nets import FSDP1, adamw, by_modules, fsdp1, fsdp2, net, only_rank0, same, train_alike, whole
from safetensors.torch import load_file, save_file
from test_wrap import train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import shardow


def fsdp1_from_meta(strategy: str, orig: bool, path: str) -> bool:
    state = net(3).state_dict()
    for source, twin in ((path, net(3)), (only_rank0(state), net(3)), (None, by_modules(5))):
        reference = fsdp1(twin, strategy, orig)
        model = fsdp1(net(None), strategy, orig)
        shardow.materialize(model, source, seed=5)
        assert same(whole(model), whole(reference))
        assert train_alike(model, adamw(model), reference)
        assert model.blocks[0].gain is model.blocks[0].scale
    model = fsdp1(net(None), strategy, orig)
    for name in ("narrow.bias", "blocks.1.calls"):
        lacking = {key: tensor for key, tensor in state.items() if key != name}
        for source in (lacking, only_rank0(lacking), f"{path}.{name}.safetensors"):
            with pytest.raises(
                ValueError,
                match=f"missing in the source: {name}; they have memory without values since FSDP1 wrapped them",
            ):
                shardow.materialize(model, source, strict=False)
    shardow.materialize(model, state)
    return same(whole(model), whole(fsdp1(net(3), strategy, orig)))


@pytest.mark.parametrize(("strategy", "world", "orig"), FSDP1)
def test_fsdp1_that_was_wrapped_on_meta_trains_as_one_that_was_built_whole(
    strategy: str, world: int, orig: bool, tmp_path: Path
) -> None:
    shardow.save(net(3), tmp_path / "a.safetensors")
    for name in ("narrow.bias", "blocks.1.calls"):
        shardow.save(
            {key: tensor for key, tensor in net(3).state_dict().items() if key != name},
            tmp_path / f"a.safetensors.{name}.safetensors",
        )
    assert ranks.run(world, fsdp1_from_meta, strategy, orig, str(tmp_path / "a.safetensors")) == [True] * world


def bound_before_fsdp1(path: str) -> bool:
    reference = fsdp1(net(3), "FULL_SHARD", True)
    model = net(None)
    model.narrow.requires_grad_(False)
    reference.narrow.requires_grad_(False)
    optimizer = adamw(model)
    wrapped = fsdp1(model, "FULL_SHARD", True)
    shardow.load(wrapped, path, optimizer=optimizer)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in wrapped.parameters()]
    assert not wrapped.narrow.weight.requires_grad
    return train_alike(wrapped, optimizer, reference)


def flat_and_bound(path: str) -> str:
    model = net(None)
    optimizer = adamw(model)
    wrapped = fsdp1(model, "FULL_SHARD", False)
    with pytest.raises(ValueError, match="optimizer group 0") as error:
        shardow.load(wrapped, path, optimizer=optimizer)
    shardow.load(wrapped, path)
    assert same(whole(wrapped), whole(fsdp1(net(3), "FULL_SHARD", False)))
    return str(error.value)


def test_an_optimizer_made_before_fsdp1_made_its_parameters_flat_is_an_error(tmp_path: Path) -> None:
    shardow.save(net(3), tmp_path / "a.safetensors")
    for told in ranks.run(2, flat_and_bound, str(tmp_path / "a.safetensors")):
        assert "is not in the model" in told


def test_an_optimizer_made_before_fsdp1_trains_the_model(tmp_path: Path) -> None:
    shardow.save(net(3), tmp_path / "a.safetensors")
    assert ranks.run(2, bound_before_fsdp1, str(tmp_path / "a.safetensors")) == [True, True]


def ddp_after(path: str) -> bool:
    state = net(3).state_dict()
    for source, twin in ((path, net(3)), (only_rank0(state), net(3)), (state, net(3)), (None, by_modules(5))):
        model = net(None)
        shardow.materialize(model, source, seed=5, group=dist.group.WORLD)
        wrapped, reference = DistributedDataParallel(model), DistributedDataParallel(twin)
        assert same(whole(wrapped), whole(reference))
        assert train_alike(wrapped, adamw(wrapped), reference)
    return True


def test_ddp_of_a_model_that_rank_0_alone_had_trains_as_one_that_every_rank_had(tmp_path: Path) -> None:
    shardow.save(net(3), tmp_path / "a.safetensors")
    assert ranks.run(2, ddp_after, str(tmp_path / "a.safetensors")) == [True, True]


class Experts(nn.Module):
    """Six experts on two ranks, and then on two more: three each, two and one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(6, 5, 4)), nn.Parameter(torch.randn(6, 4, 5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("the weights are looked at, not used")


class Routed(Experts):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.router, self.experts = nn.Linear(4, 6), Experts()


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList([Routed(), Routed()])

    forward = Experts.forward


def moe(on_meta: bool) -> tuple[Moe, Any]:
    """Experts over ("dp", "ep"); the rest will be over all four ranks."""
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with shardow.meta_init() if on_meta else torch.random.fork_rng():
        model = Moe()
    for layer in model.layers:
        experts = layer.experts
        for key, param in list(experts.named_parameters()):
            experts.register_parameter(key, nn.Parameter(distribute_tensor(param.detach(), mesh["ep"], [Shard(0)])))
        fully_shard(experts, mesh=mesh["dp"])
    return model, init_device_mesh("cpu", (4,))


def experts_elsewhere(directory: str) -> bool:
    state = load_file(f"{directory}/a.safetensors")
    for i, source in enumerate(
        (f"{directory}/a.safetensors", only_rank0(state), "wrap", "rank 0's weights, and experts that have theirs")
    ):
        model, mesh = moe(on_meta=i < 3)
        if i < 2:
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            shardow.materialize(model, source)
        else:
            shardow.wrap(model, mesh, source=f"{directory}/a.safetensors" if i == 2 else None)
        assert [p.device_mesh.ndim for p in model.layers[0].parameters()] == [1, 1, 2, 2]
        assert same(whole(model), state), source
        shardow.save(model, f"{directory}/{i}.safetensors")
        again = load_file(f"{directory}/{i}.safetensors")
        assert same(again, state), source
    return True


def test_experts_on_a_mesh_of_their_own_beside_layers_on_all_ranks(tmp_path: Path) -> None:
    torch.manual_seed(3)
    save_file(Moe().state_dict(), tmp_path / "a.safetensors")
    assert ranks.run(4, experts_elsewhere, str(tmp_path)) == [True] * 4


def frozen(path: str) -> bool:
    """Half of the parameters are frozen, in groups of an optimizer that was made on meta."""
    reference, model = net(3), net(None)
    groups = []
    for one in (model, reference):
        one.blocks[0].requires_grad_(False)
        frozen = [p for p in one.parameters() if not p.requires_grad]
        groups.append([{"params": [p for p in one.parameters() if p.requires_grad]}, {"params": frozen, "lr": 0.5}])
    optimizer = torch.optim.AdamW(groups[0], lr=0.01)
    fsdp2(model)
    report = shardow.load(model, path, optimizer=optimizer)
    assert report["missing"] == report["unexpected"] == report["kept"] == []
    expected = {name for name, p in reference.named_parameters() if not p.requires_grad}
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == expected
    names = {id(p): name for name, p in model.named_parameters()}
    assert [{names[id(p)] for p in group["params"]} for group in optimizer.param_groups] == [
        set(names.values()) - expected,
        expected,
    ]
    before = whole(model)
    train(model, optimizer)
    changed = {name for name, tensor in whole(model).items() if not torch.equal(tensor, before[name])}
    assert not changed & expected
    assert changed >= {"embed.weight", "blocks.1.up.weight"}
    other = {name: tensor + 1 for name, tensor in net(3).state_dict().items()}
    shardow.materialize(model, other)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == expected
    return same(models.whole_weights(model), {name: other[name] for name in names.values()})


def test_frozen_weights_stay_frozen_in_the_model_and_in_the_groups_of_its_optimizer(tmp_path: Path) -> None:
    shardow.save(net(3), tmp_path / "a.safetensors")
    assert ranks.run(2, frozen, str(tmp_path / "a.safetensors")) == [True, True]


F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def cast_beside_experts() -> list[torch.dtype]:
    """Experts that wrap() leaves as they are, then a cast, for which torch swaps what they are; and an optimizer that
    still knows them.
    """
    found = []
    for efficient in (False, True):
        model, mesh = moe(on_meta=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = whole(model)
        shardow.wrap(model, mesh, optimizer, memory_efficient_init=efficient)
        assert same(whole(model), before)
        model.to(torch.bfloat16)
        assert same(whole(model), {name: tensor.to(torch.bfloat16) for name, tensor in before.items()})
        assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
        found += [p.dtype for p in model.parameters()]
    return found


def test_a_model_with_experts_that_were_sharded_before_is_cast() -> None:
    assert set(ranks.run(4, cast_beside_experts)[0]) == {torch.bfloat16}


def attributes_of(model: nn.Module) -> dict[str, list[str]]:
    return {
        name: sorted(key for key, value in module.__dict__.items() if isinstance(value, torch.Tensor))
        for name, module in model.named_modules()
    }


def attributes_of_fsdp1() -> bool:
    model = fsdp1(net(None), "FULL_SHARD", False)
    before = attributes_of(model)
    shardow.materialize(model, seed=5)
    assert any("weight" in keys for keys in before.values())
    return attributes_of(model) == before


def test_an_initialisation_leaves_the_attributes_that_fsdp1_made() -> None:
    assert ranks.run(2, attributes_of_fsdp1) == [True, True]
