"""materialize(model): the values that constructors give, whatever they do after reset_parameters(), or without one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardow


def built(build: Callable[[], nn.Module], **options: Any) -> dict[str, torch.Tensor]:
    with shardow.meta_init():
        model = build()
    assert all(p.is_meta for p in model.parameters())
    shardow.materialize(model, **options)
    assert not any("_shardow" in key for module in model.modules() for key in vars(module))
    return model.state_dict()


class Gate(nn.Module):
    """No reset_parameters(), every way to make a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.cls = nn.Parameter(0.25 * torch.arange(6.0).view(2, 3))
        self.flat = nn.Parameter(torch.full((4,), -2.0, dtype=torch.bfloat16))
        self.legacy = nn.Parameter(torch.Tensor(3, 3))
        self.orthogonal = nn.Parameter(torch.empty(4, 6))
        self.normal = nn.Parameter(torch.empty(64, 32))
        self.register_buffer("table", torch.arange(4))
        nn.init.eye_(self.legacy)
        nn.init.orthogonal_(self.orthogonal)
        nn.init.trunc_normal_(self.normal, std=0.02)
        with torch.no_grad():
            self.normal[3].fill_(9.0)
            self.normal.data[:, :2].zero_()


def test_what_a_constructor_made_is_kept() -> None:
    found = built(Gate)
    assert torch.equal(found["scale"], torch.ones(5))
    assert torch.equal(found["cls"], 0.25 * torch.arange(6.0).view(2, 3))
    assert torch.equal(found["flat"], torch.full((4,), -2.0, dtype=torch.bfloat16))
    assert torch.equal(found["legacy"], torch.eye(3))
    assert torch.equal(found["table"], torch.arange(4))
    assert torch.allclose(found["orthogonal"] @ found["orthogonal"].T, torch.eye(4), atol=1e-5)
    assert (found["normal"][3, 2:] == 9).all()
    assert (found["normal"][:, :2] == 0).all()
    drawn = found["normal"][4:, 2:]
    assert 0.015 < drawn.std() < 0.025
    assert torch.equal(built(Gate)["normal"], found["normal"]), "the seed decides"
    assert not torch.equal(built(Gate, seed=1)["normal"], found["normal"])


class DiTBlock(nn.Module):
    """What DiT does to its children after they have initialised themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(8, 8)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(8, 12))
        self.patch = nn.Conv2d(3, 8, 2)
        self.position = nn.Parameter(torch.zeros(1, 4, 8), requires_grad=False)
        self.apply(self._basic)
        self.position.data.copy_(torch.arange(32.0).view(1, 4, 8))
        weight = self.patch.weight.data
        nn.init.xavier_uniform_(weight.view([weight.shape[0], -1]))
        nn.init.constant_(self.patch.bias, 0)
        nn.init.constant_(self.modulation[-1].weight, 0)
        self.modulation[-1].bias.data.fill_(1.5)

    def _basic(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.constant_(module.bias, 0)


def check_dit(found: dict[str, torch.Tensor]) -> None:
    assert (found["modulation.1.weight"] == 0).all()
    assert (found["modulation.1.bias"] == 1.5).all()
    assert (found["attention.bias"] == 0).all()
    assert (found["patch.bias"] == 0).all()
    assert torch.equal(found["position"], torch.arange(32.0).view(1, 4, 8))
    bound = math.sqrt(6 / 16)
    assert 0.8 * bound < found["attention.weight"].abs().max() <= bound
    bound = math.sqrt(6 / (8 + 12))
    assert 0.8 * bound < found["patch.weight"].abs().max() <= bound, "by the fan of the view"


class OtherOrders(nn.Module):
    """Weights that do not lie row by row, of which parts are written: before and after the order changes."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.zeros(3, 2).t())
        self.conv = nn.Conv2d(3, 2, 2)
        nn.init.ones_(self.conv.weight)
        with torch.no_grad():
            self.turned[0].fill_(7.0)
            self.conv.weight[1, 0].fill_(2.0)
        nn.init.constant_(self.turned[1, :2], 3.0)
        self.conv.to(memory_format=torch.channels_last)
        nn.init.constant_(self.conv.weight[:, 1], 5.0)
        nn.init.zeros_(self.conv.bias)


def test_what_is_written_into_parts_of_weights_in_another_order_is_kept() -> None:
    expected = OtherOrders().state_dict()
    assert not expected["turned"].is_contiguous()
    assert not expected["conv.weight"].is_contiguous()
    state = built(OtherOrders)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def test_what_a_parent_writes_over_its_children_is_kept() -> None:
    check_dit(built(DiTBlock))


def on_two_ranks() -> dict[str, torch.Tensor]:
    with shardow.meta_init():
        model = DiTBlock()
    fully_shard(model.attention, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    shardow.materialize(model)
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }


def test_the_values_are_the_same_at_any_world_size() -> None:
    alone = built(DiTBlock)
    for found in ranks.run(2, on_two_ranks):
        check_dit(found)
        assert all(torch.equal(found[name], value) for name, value in alone.items())


def test_modules_of_torch_without_reset_parameters() -> None:
    layer = built(lambda: nn.TransformerEncoderLayer(8, 2, 16))
    assert (layer["self_attn.out_proj.bias"] == 0).all()
    assert (layer["self_attn.in_proj_bias"] == 0).all()
    assert layer["self_attn.in_proj_weight"].std() > 0.1
    encoder = built(lambda: nn.Transformer(8, 2, 2, 1, 16))
    for name, value in encoder.items():
        if value.ndim > 1:  # Transformer itself draws them again, of deep copies as well
            bound = math.sqrt(6 / sum(value.shape))
            assert 0.7 * bound < value.abs().max() <= bound, name
    assert not torch.equal(encoder["encoder.layers.0.linear1.weight"], encoder["encoder.layers.1.linear1.weight"])


def test_attention_built_on_meta_without_us_initialises_itself() -> None:
    with torch.device("meta"):
        model = nn.MultiheadAttention(8, 2)
    shardow.materialize(model)
    assert (model.in_proj_bias == 0).all()
    assert model.in_proj_weight.std() > 0.1


def test_a_transformers_model_begins_as_transformers_begins_it() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=100, n_positions=32)
    found = built(lambda: transformers.GPT2LMHeadModel(config))
    plain = transformers.GPT2LMHeadModel(config).state_dict()
    for name, value in plain.items():
        if "ln_" in name or name.endswith("bias"):
            assert torch.equal(found[name], value), name
        else:
            assert float(found[name].std()) == pytest.approx(float(value.std()), rel=0.2), name


def test_what_a_call_in_the_block_initialises_is_kept() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def init_weights(self) -> None:
            nn.init.ones_(self.layer.weight)

    def build() -> nn.Module:
        model = Model()
        model.init_weights()
        return model

    assert (built(build)["layer.weight"] == 1).all()


def test_tied_weights_have_the_last_values() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        nn.init.constant_(model[0].weight, 4.0)
        return model

    assert (built(build)["0.weight"] == 4).all()


def test_copies_of_a_module_are_initialised_as_it_is() -> None:
    with shardow.meta_init():
        gate = Gate()
        inside = copy.deepcopy(gate)
        nn.init.constant_(inside.scale, 7.0)
    for model, scale in ((inside, 7.0), (copy.deepcopy(gate), 1.0), (gate, 1.0)):
        shardow.materialize(model)
        assert (model.scale == scale).all()
        assert torch.equal(model.cls, 0.25 * torch.arange(6.0).view(2, 3))


def test_deep_copies_begin_equal() -> None:
    def build() -> nn.Module:
        layer = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8))
        nn.init.trunc_normal_(layer[0].bias)
        model = nn.ModuleList([layer, copy.deepcopy(layer), copy.deepcopy(layer)])
        nn.init.normal_(model[2][0].weight)
        return model

    state = built(build)
    for name, value in state.items():
        if name.startswith("0."):
            assert torch.equal(state[f"1{name[1:]}"], value), name
            assert torch.equal(state[f"2{name[1:]}"], value) != (name == "0.0.weight"), name
    drawn = [value.flatten()[0].item() for name, value in state.items() if value.ndim > 1 and name.startswith("0.")]
    assert len({*drawn}) == len(drawn)


class Computed(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if what == "data":
            self.b.weight.data = self.b.weight.data * 2
        elif what == "parameter":
            self.b.weight = nn.Parameter(self.a.weight.norm(dim=0, keepdim=True) * self.b.weight)
        elif what == "foreach":
            torch._foreach_mul_([self.b.weight.data, self.a.weight.data], 2.0)
        elif what == "tied data":
            self.b.weight.data = self.a.weight.data
        elif what == "tied parameter":
            self.b.weight = nn.Parameter(self.a.weight.data)
        elif what == "loaded":
            self.b.load_state_dict(self.a.state_dict())
        elif what == "swapped":
            self.b.weight.data.mul_(self.a.weight.data)
        elif what in ("written", "its parameter"):
            values = torch.arange(9.0).view(3, 3)
            weight = nn.Parameter(values)
            self.b.weight = weight
            values.add_(1) if what == "written" else nn.init.eye_(weight)
        elif what == "norm":
            nn.utils.parametrizations.weight_norm(self.b)


@pytest.mark.parametrize(
    "what",
    [
        "data", "parameter", "foreach", "tied data", "tied parameter", "loaded", "swapped", "norm", "written",
        "its parameter",
    ],
)  # fmt: skip
def test_values_that_cannot_be_made_again_are_refused_by_name(what: str) -> None:
    with shardow.meta_init():
        model = Computed(what)
    with pytest.raises(ValueError, match=r"not kept: .*'(a|b)\.[a-z.]*weight"):
        shardow.materialize(model)
    with shardow.meta_init():
        shardow.materialize(nn.Sequential(Computed("")).to(torch.bfloat16))
        model = Computed(what)
        for param in model.parameters():
            nn.init.ones_(param)
    if "tied" not in what and what != "norm":
        shardow.materialize(model)
        assert all((param == 1).all() for param in model.parameters())


class Drawing(nn.Module):
    def __init__(self, number: float = 0.5) -> None:
        super().__init__()
        self.weight, self.scalar = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(1))
        self.other = nn.Parameter(torch.empty(3, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.other.data.copy_(torch.rand(3)).mul_(number)


def drawn() -> list[dict[str, torch.Tensor]]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    expected = Drawing().state_dict()
    states = []
    for wrap in (lambda model: model, lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,)))):
        torch.manual_seed(rank)
        with shardow.meta_init():
            model = wrap(Drawing())
        shardow.materialize(model, group=torch.distributed.group.WORLD)
        state = model.state_dict()
        states.append(
            {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in state.items()}
        )
    with shardow.meta_init():
        model = Drawing(rank)
    with pytest.raises(shardow.Error, match=r"'other' is .* on rank 0 and .* on rank 1"):
        shardow.materialize(model, group=torch.distributed.group.WORLD)
    return [expected, *states]


def test_what_constructors_draw_is_that_of_rank_0() -> None:
    (expected, *first), (_, *second) = ranks.run(2, drawn)
    for state in (*first, *second):
        assert all(torch.equal(state[name], value) for name, value in expected.items())


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("persistent", torch.randn(4))
        self.register_buffer("table", torch.randn(4), persistent=False)


def drawn_buffers() -> tuple[list[float], list[float], list[float]]:
    torch.manual_seed(torch.distributed.get_rank())
    with shardow.meta_init():
        module = Drawn()
    own = module.table.tolist()
    shardow.materialize(module, group=torch.distributed.group.WORLD)
    return module.persistent.tolist(), module.table.tolist(), own


def test_persistent_buffers_are_drawn_once_for_all_and_tables_by_each_rank() -> None:
    first, second = ranks.run(2, drawn_buffers)
    assert first[0] == second[0]
    assert first[1] == first[2] != second[2] == second[1]


def test_large_values_of_a_constructors_own_are_said_not_to_be_kept() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1025, 2048))

    with shardow.meta_init():
        model = Large()
    with pytest.raises(ValueError, match=r"not kept: 'weight' \(its constructor made 8 MiB of values itself"):
        shardow.materialize(model)
    assert model.weight.is_meta
    shardow.materialize(model, lambda module: module.weight.zero_())
    assert (model.weight == 0).all()


def test_what_nobody_wrote_is_still_an_error() -> None:
    class Unwritten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, 4))
            self.other = nn.Parameter(torch.zeros(3))
            self.part = nn.Parameter(torch.empty(3, 4))
            nn.init.ones_(self.part[1])

    with shardow.meta_init():
        model = Unwritten()
    with pytest.raises(ValueError, match="weight, part got no values"):
        shardow.materialize(model)


def test_plain_layers_have_the_values_of_reset_parameters() -> None:
    found = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), seed=11)
    expected = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    torch.manual_seed(11)
    for module in expected:
        module.reset_parameters()
    assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())


def test_an_initialisation_draws_none_of_the_trainings_random_numbers() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with shardow.meta_init():
        model = nn.Linear(3, 3)
    shardow.materialize(model)
    assert torch.equal(torch.rand(3), expected)


def test_deep_copies_after_an_inner_block_are_recorded() -> None:
    with shardow.meta_init():
        layer = nn.Linear(3, 3)
        with shardow.meta_init():
            nn.Linear(1, 1)
        twin = copy.deepcopy(layer)
        nn.init.constant_(twin.weight, 7.0)
        model = nn.Sequential(layer, twin)
    shardow.materialize(model)
    assert bool((twin.weight == 7).all())
    assert not bool((layer.weight == 7).any())
