"""Models whose names are not those of the checkpoint that fills them: LoRA as PEFT builds it, parametrizations,
wrappers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import ranks
import torch
from nets import State, adamw, fsdp2, only_rank0, same, whole
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import shardow


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(6, 5), nn.Linear(5, 6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.o_proj(self.q_proj(hidden).relu())


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class LoraLinear(nn.Module):
    """Named as PEFT names it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, base.out_features, bias=False)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base_layer(hidden) + self.lora_B["default"](self.lora_A["default"](hidden))


class Around(nn.Module):
    def __init__(self, key: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(key, inner)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return next(self.children())(hidden)


def own_lora(model: Base) -> nn.Module:
    for layer in model.requires_grad_(False).layers:
        layer.q_proj = LoraLinear(layer.q_proj)
    return Around("base_model", Around("model", model))


def peft_lora(model: Base) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=3, lora_alpha=3, init_lora_weights=False))


LORA: dict[str, Callable[[Base], nn.Module]] = {"own": own_lora, "peft": peft_lora}


def lora_states() -> tuple[State, State, State]:
    """A base model's checkpoint, an adapter's as PEFT writes it, and both as the model with LoRA calls them."""
    torch.manual_seed(3)
    base = Base()
    with torch.random.fork_rng():
        state = own_lora(base).state_dict()
    adapter = {name.replace(".default.", "."): tensor for name, tensor in state.items() if "lora" in name}
    return (
        {
            k.removeprefix("base_model.model.").replace("base_layer.", ""): v
            for k, v in state.items()
            if "lora" not in k
        },
        adapter,
        state,
    )


def is_lora(name: str) -> bool:
    return "lora_" in name


def lora_in_steps(kind: str, directory: str) -> bool:
    base, adapter, state = lora_states()
    layers = "base_model.model.layers"
    loras = [name for name in state if is_lora(name)]
    for source in (f"{directory}/base.safetensors", only_rank0(base)):
        with shardow.meta_init():
            model = fsdp2(LORA[kind](Base()), layers)
        with pytest.raises(ValueError, match=r"missing in the (file|source): .*q_proj\.lora_A\.default\.weight"):
            shardow.materialize(model, source)
        assert all(p.is_meta for p in model.parameters())
        report = shardow.materialize(model, source, strict=False)
        assert sorted(report["missing"]) == sorted(loras)
        assert report["unexpected"] == report["kept"] == []
        assert {name for name, p in model.named_parameters() if p.is_meta} == set(loras)
        assert {name for name, p in model.named_parameters() if p.requires_grad} == set(loras)
        optimizer = adamw(model)
        report = shardow.materialize(model, f"{directory}/adapter.safetensors", optimizer)
        assert report["missing"] == report["unexpected"] == []
        assert sorted(report["kept"]) == sorted(set(state) - set(loras))
        assert same(whole(model), state)
        assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    expected = LORA[kind](Base())
    expected.load_state_dict(dict(state))
    assert torch.equal(model(torch.ones(2, 6)), expected(torch.ones(2, 6)))
    with shardow.meta_init():
        model = fsdp2(LORA[kind](Base()), layers)
    report = shardow.materialize(model, adapter, strict=False)
    assert sorted(report["missing"]) == sorted(set(state) - set(loras))
    report = shardow.materialize(model, base)  # LoRA weights have values by now, and keep them
    assert sorted(report["kept"]) == sorted(loras)
    assert same(whole(model), state)
    report = shardow.materialize(model, {name: tensor + 1 for name, tensor in base.items()}, strict=False)
    assert sorted(report["missing"]) == sorted(loras)  # as load() into a model that has values
    return same(whole(model), {name: tensor if is_lora(name) else tensor + 1 for name, tensor in state.items()})


def lora_by_init() -> bool:
    base, _, state = lora_states()
    with shardow.meta_init():
        model = fsdp2(own_lora(Base()), "base_model.model.layers")
    shardow.materialize(model, base, strict=False)
    report = shardow.materialize(model, lambda module: [p.fill_(7) for p in module.parameters(recurse=False)])
    assert sorted(report["kept"]) == sorted(name for name in state if not is_lora(name))
    return same(whole(model), {name: torch.full_like(t, 7) if is_lora(name) else t for name, t in state.items()})


def test_an_initialisation_fills_lora_weights_alone() -> None:
    assert ranks.run(2, lora_by_init) == [True, True]


def test_names_of_lora_weights_that_could_be_meant_for_two_adapters_are_an_error() -> None:
    _, adapter, state = lora_states()
    model = own_lora(Base())
    model.load_state_dict(dict(state))
    for layer in model.get_submodule("base_model.model").layers:
        layer.q_proj.lora_A["other"] = nn.Linear(6, 3, bias=False)
    with pytest.raises(
        ValueError,
        match=r"lora_A.weight' in the source could be '.*lora_A.default.weight' or '.*lora_A.other.weight' here",
    ):
        shardow.materialize(model, adapter, strict=False)
    before = model.get_parameter("base_model.model.layers.0.q_proj.lora_A.other.weight").clone()
    report = shardow.materialize(model, state, strict=False)  # whole names say which is meant
    assert report["missing"] == [f"base_model.model.layers.{i}.q_proj.lora_A.other.weight" for i in (0, 1)]
    assert torch.equal(model.get_parameter("base_model.model.layers.0.q_proj.lora_A.other.weight"), before)


@pytest.mark.parametrize("kind", list(LORA))
def test_a_base_checkpoint_and_then_an_adapter_fill_a_model_with_lora(kind: str, tmp_path: Path) -> None:
    base, adapter, _ = lora_states()
    save_file(dict(base), tmp_path / "base.safetensors")
    save_file(dict(adapter), tmp_path / "adapter.safetensors")
    assert ranks.run(2, lora_in_steps, kind, str(tmp_path)) == [True, True]


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "module.",
        "base_model.model.",
        "base_model.model.base_model.model.",
        "module._orig_mod.base_model.model.",
        "_fsdp_wrapped_module.",
    ],
)
def test_names_of_wrappers_and_of_peft_in_a_source_are_seen_through(prefix: str) -> None:
    base, _, _ = lora_states()
    for source in (
        {prefix + name: tensor for name, tensor in base.items()},
        {prefix + n.replace("q_proj.", "q_proj.base_layer."): t for n, t in base.items()},
    ):
        with shardow.meta_init():
            model = Base()
        shardow.materialize(model, source)
        assert same(model.state_dict(), base)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def parametrized(on_meta: bool) -> nn.Module:
    with shardow.meta_init() if on_meta else torch.random.fork_rng():
        model = Base()
        parametrize.register_parametrization(model.layers[0].q_proj, "weight", Doubled())
        parametrizations.weight_norm(model.layers[1].o_proj)
    return model


def parametrized_from(path: str) -> bool:
    expected = parametrized(False)
    shardow.load(expected, path)
    with shardow.meta_init():
        model = fsdp2(parametrized(True), "layers")
    shardow.load(model, path)
    assert same(whole(model), dict(expected.named_parameters()))
    plain = {
        name.replace("parametrizations.", "").replace(".original", "") if name.endswith("original") else name: t
        for name, t in shardow.open(path).items()
    }
    assert "layers.0.q_proj.weight" in plain
    model = fsdp2(parametrized(True), "layers")
    shardow.materialize(model, only_rank0(plain))
    assert torch.equal(model(torch.ones(2, 6)), expected(torch.ones(2, 6)))
    return same(whole(model), dict(expected.named_parameters()))


def test_parametrized_weights_come_from_their_originals_and_from_a_file_of_the_plain_model(tmp_path: Path) -> None:
    shardow.save(parametrized(False), tmp_path / "a.safetensors")
    assert ranks.run(2, parametrized_from, str(tmp_path / "a.safetensors")) == [True, True]


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("q.lora_A.default.weight", "base_model.model.q.lora_A.weight"),
        ("q.lora_B.default.bias", "module.q.lora_B.bias"),
        ("embed.lora_embedding_A.default", "base_model.model.embed.lora_embedding_A"),
        ("q.lora_magnitude_vector.default.weight", "q.lora_magnitude_vector"),
        ("q.lora_A.default.weight", "q.lora_A.default.weight"),
        ("lora_A.weight", "lora_A.weight"),
    ],
)
def test_an_adapter_is_known_by_what_peft_writes(here: str, there: str) -> None:
    model = nn.Module()
    *path, key = here.split(".")
    module = model
    for name in path:
        module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    module.register_parameter(key, nn.Parameter(torch.empty(2, device="meta")))
    shardow.materialize(model, {there: torch.ones(2)})
    assert torch.equal(model.get_parameter(here), torch.ones(2))


def test_one_adapters_weights_are_not_anothers() -> None:
    model = nn.ModuleDict({"lora_A": nn.ModuleDict({"student": nn.Linear(2, 2, bias=False)})})
    with pytest.raises(
        ValueError,
        match=r"missing in the source: lora_A\.student\.weight; unexpected in the source: lora_A\.default\.weight",
    ):
        shardow.materialize(model, {"lora_A.default.weight": torch.ones(2, 2)})
