"""Models that get their weights after they were built: what people really train, against the same models built whole, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from test_wrap import train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import shardow

State = Mapping[str, torch.Tensor]
KINDS = [
    (strategy, world, orig) for strategy, world in (("FULL_SHARD", 2), ("FULL_SHARD", 4), ("HYBRID_SHARD", 4)) for orig in (True, False)
]
FSDP1 = KINDS if os.environ.get("SHARDOW_ALL") else [KINDS[0], KINDS[5]]


class Block(nn.Module):
    """Two tied weights, and buffers that files have: one of them under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.down.weight = self.up.weight
        scale = torch.tensor([0.5, 0.25, 0.125])
        self.register_buffer("scale", scale)
        self.register_buffer("gain", scale)
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.register_buffer("calls", torch.tensor(2**60 + 1))

    def reset_parameters(self) -> None:
        self.scale.copy_(torch.rand(3))
        self.calls.fill_(7)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.up(self.norm(hidden)).relu()) * self.scale.sum() + self.table / 8


class Net(nn.Module):
    """Rows 9, 6 and 1: uneven on 2 and 4 ranks, and empty on some."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.narrow = nn.Linear(6, 1)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.narrow(hidden)


def net(seed: int | None) -> Net:
    """Seed None: on meta."""
    if seed is None:
        with shardow.meta_init():
            return Net()
    torch.manual_seed(seed)
    model = Net()
    with torch.no_grad():
        for block in model.blocks:
            block.scale.uniform_()
    return model


def by_modules(seed: int) -> Net:
    """What materialize() without a source is to make."""
    model = net(0)
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def fsdp1(model: Net, strategy: str, orig: bool) -> nn.Module:
    world = dist.get_world_size()
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": orig, "sharding_strategy": ShardingStrategy[strategy]}
    if strategy == "HYBRID_SHARD":
        options["device_mesh"] = init_device_mesh("cpu", (2, world // 2))
    if model.embed.weight.is_meta:
        options["param_init_fn"] = shardow.to_empty
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def fsdp2(model: nn.Module, units: str = "blocks") -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in dict(model.named_modules())[units].children():
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights, and buffers that files have or not."""
    buffers = {name.replace("_fsdp_wrapped_module.", "").removeprefix("module."): b for name, b in model.named_buffers()}
    return {**models.whole_weights(model), **buffers}


def same(a: State, b: State) -> bool:
    """Or an error that names what differs in a bit."""
    differing = sorted(name for name in {*a, *b} if name not in a or name not in b or not same_bits(a[name], b[name]))
    assert not differing, differing
    return True


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*(one.detach().reshape(-1).view(torch.uint8) for one in (a, b)))


def train_alike(model: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module) -> bool:
    """Five losses, and what is there afterwards: ties, and memory that is the model's."""
    expected = train(reference, adamw(reference))
    assert torch.equal(torch.stack(train(model, optimizer)), torch.stack(expected))
    return same(whole(model), whole(reference))


def only_rank0(state: State) -> Any:
    return state if dist.get_rank() == 0 else None


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
                ValueError, match=f"missing in the source: {name}; they have memory without values since FSDP1 wrapped them"
            ):
                shardow.materialize(model, source, strict=False)
    shardow.materialize(model, state)
    return same(whole(model), whole(fsdp1(net(3), strategy, orig)))


@pytest.mark.parametrize(("strategy", "world", "orig"), FSDP1)
def test_fsdp1_that_was_wrapped_on_meta_trains_as_one_that_was_built_whole(strategy: str, world: int, orig: bool, tmp_path: Path) -> None:
    shardow.save(net(3), tmp_path / "a.safetensors")
    for name in ("narrow.bias", "blocks.1.calls"):
        shardow.save(
            {key: tensor for key, tensor in net(3).state_dict().items() if key != name}, tmp_path / f"a.safetensors.{name}.safetensors"
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
    for i, source in enumerate((f"{directory}/a.safetensors", only_rank0(state), "wrap", "rank 0's weights, and experts that have theirs")):
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
    assert [{names[id(p)] for p in group["params"]} for group in optimizer.param_groups] == [set(names.values()) - expected, expected]
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
CASTS = [(a, b) for a in (F16, BF16, F32, F64) for b in (F16, BF16, F32, F64)]


class Odd(nn.Module):
    """A scalar, nothing at all, and one element more than two ranks share evenly."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.nothing = nn.Parameter(torch.zeros(65, 3, dtype=dtype)), nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        self.register_buffer("scalar", torch.tensor(0.0, dtype=dtype))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("none", torch.zeros(0, 2, dtype=torch.int64))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))


def odd_state(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    weight = torch.cat(
        [torch.randn(62, 3, dtype=F64), torch.tensor([[0.0, -0.0, torch.inf], [1e-42, 1 + 2**-8 + 2**-40, 7e4], [1 + 2**-11, 3e38, 6e-8]])]
    )
    return {
        "weight": weight.to(dtype), "nothing": torch.zeros(0, 3, dtype=dtype), "scalar": torch.tensor(1 / 3, dtype=F64).to(dtype),
        "count": torch.tensor(2**60 + 1),
        "none": torch.zeros(0, 2, dtype=torch.int64), "flags": torch.tensor([True, False, True, True, False]),
    }  # fmt: skip


def cast_alike(directory: str) -> list[str]:
    wrong = []
    for there, here in CASTS:
        state = odd_state(there)
        expected = {name: tensor.to(here) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
        for how, source in (("file", f"{directory}/{there}.safetensors"), ("mapping", state), ("rank 0", only_rank0(state))):
            with shardow.meta_init():
                model = Odd(here)
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
            shardow.materialize(model, source)
            found = whole(model)
            wrong += [f"{name} {how} {there} -> {here}" for name in expected if not same_bits(found[name], expected[name])]
    for name, bad in (("weight", torch.zeros(65, 3, dtype=torch.int64)), ("count", torch.tensor(1.0)), ("flags", torch.zeros(5))):
        for source in ({**odd_state(F32), name: bad}, only_rank0({**odd_state(F32), name: bad})):
            with shardow.meta_init():
                model = fully_shard(Odd(F32), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
            with pytest.raises(ValueError, match=f"'{name}' is {bad.dtype} in the source and .* here, and only floating numbers are cast"):
                shardow.materialize(model, source)
    return wrong


def test_floating_dtypes_are_cast_as_torch_does_and_others_are_exact(tmp_path: Path) -> None:
    for dtype in (F16, BF16, F32, F64):
        save_file(odd_state(dtype), tmp_path / f"{dtype}.safetensors")
    assert ranks.run(2, cast_alike, str(tmp_path)) == [[], []]


class Shared(nn.Module):
    """Objects that are registered twice, not assigned from one module to another."""

    def __init__(self) -> None:
        super().__init__()
        weight, scale, table = nn.Parameter(torch.ones(3)), torch.ones(2), torch.ones(2)
        self.a, self.b = weight, weight
        self.register_buffer("scale", scale)
        self.register_buffer("scale_too", scale, persistent=False)
        self.register_buffer("table_too", table, persistent=False)
        self.register_buffer("table", table)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.b)
        self.scale.fill_(5)


def test_what_is_registered_under_two_names_is_one_tensor_before_and_after() -> None:
    state = {"a": torch.tensor([1.0, 2, 3]), "scale": torch.full((2,), 4.0), "table": torch.full((2,), 6.0)}
    for source in (state, {**state, "b": state["a"]}, None):
        with shardow.meta_init():
            model = Shared()
        assert model.a.is_meta
        shardow.materialize(model, source)
        assert model.a is model.b
        assert model.scale is model.scale_too
        assert model.table is model.table_too
        wanted = state if source is not None else {"scale": torch.full((2,), 5.0), "table": torch.ones(2)}
        assert all(torch.equal(getattr(model, name), tensor) for name, tensor in wanted.items())


def test_an_initialisation_that_passes_a_tensor_over_is_an_error() -> None:
    with shardow.meta_init():
        model = nn.Sequential(nn.Linear(2, 3), Block())
    with pytest.raises(ValueError, match=r"left 1.calls without values; give a function that sets them as source"):
        shardow.materialize(
            model, lambda module: [p.data.normal_() for p in [*module.parameters(False), *module.buffers(False)] if p.is_floating_point()]
        )
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(ValueError, match=r"left 0.bias, 1.norm.weight, .* without values"):
        shardow.materialize(model, lambda module: isinstance(module, nn.Linear) and module.weight.data.normal_())


def both_names(path: str) -> bool:
    state = net(3).state_dict()
    for model in (net(None), net(5)):
        fsdp2(model)
        report = shardow.load(model, path)
        assert report["unexpected"] == report["missing"] == []
        assert model.head.weight is model.embed.weight
        assert model.blocks[0].gain is model.blocks[0].scale
        assert same(whole(model), whole(fsdp2(net(3))))
    for source in (state, only_rank0(state), {f"module.{name}": tensor for name, tensor in state.items()}):
        model = fsdp2(net(None))
        shardow.materialize(model, source)
        assert same(whole(model), whole(fsdp2(net(3))))
    with pytest.raises(ValueError, match=r"unexpected in the file: .*other"):
        shardow.load(model, f"{path}.more.safetensors")
    assert shardow.load(model, f"{path}.more.safetensors", strict=False)["unexpected"] == ["other"]
    return True


def test_a_file_that_has_a_tied_tensor_under_all_its_names_fits(tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in net(3).state_dict().items()}
    assert {"embed.weight", "head.weight", "blocks.0.down.weight", "blocks.0.gain"} <= set(state)
    save_file(state, tmp_path / "a.safetensors")
    save_file({**state, "other": torch.zeros(1)}, tmp_path / "a.safetensors.more.safetensors")
    assert ranks.run(2, both_names, str(tmp_path / "a.safetensors")) == [True, True]


def cast_beside_experts() -> list[torch.dtype]:
    """Experts that wrap() leaves as they are, then a cast, for which torch swaps what they are; and an optimizer that still knows them."""
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
