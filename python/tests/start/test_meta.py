"""meta_init() and materialize(): the same model, bit for bit, as one that was built whole on every rank and sharded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import shardow
from shardow.start import meta

KINDS = [
    ("plain", 1),
    ("ddp", 2),
    ("fsdp1", 2),
    ("fsdp2", 1),
    ("fsdp2", 2),
    ("fsdp2", 3),
    ("fsdp2", 4),
    ("hsdp", 4),
    ("tp+fsdp2", 4),
]


class Rotary(nn.Module):
    """A table that no file has, known by two names, and counters that every file has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("original", self.table, persistent=False)
        self.register_buffer("calls", torch.tensor(3))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.rotary = Rotary()
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden) + self.rotary.table
        return self.head(hidden)


def test_under_meta_init_weights_have_no_memory_and_tables_have_their_values() -> None:
    with shardow.meta_init():
        model = Model()
    assert all(p.is_meta for p in model.parameters())
    assert model.rotary.calls.is_meta
    assert torch.equal(model.rotary.table, torch.arange(4.0))
    assert model.rotary.original is model.rotary.table
    assert model.head.weight is model.embed.weight
    assert not nn.Linear(2, 2).weight.is_meta


def test_tables_follow_the_weights_to_another_device() -> None:
    model = Model()
    meta.move_tables(model, "meta")  # another device than the CPU that every machine has
    assert model.rotary.table.is_meta
    assert model.rotary.original is model.rotary.table
    assert not model.rotary.calls.is_meta
    assert not any(p.is_meta for p in model.parameters())


def weights_by(kind: str) -> Callable[[], nn.Sequential]:
    return models.make_even if kind.startswith("tp") else models.make


def materialized(kind: str, source: Any, **options: Any) -> nn.Module:
    with shardow.meta_init():
        model = weights_by(kind)()
    if kind == "ddp":  # it wants memory when it wraps
        shardow.materialize(model, source if not callable(source) else source(), **options)
        return models.PARALLEL[kind](model, dist.get_world_size())
    model = models.PARALLEL[kind](model, dist.get_world_size())
    shardow.materialize(model, source() if callable(source) else source, **options)
    return model


def losses(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(5):
        loss = F.mse_loss(model(models.batch(generator)), torch.ones(()))
        found.append(loss.detach().clone())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def same_as_whole(kind: str, path: str) -> bool:
    """From a file, from a mapping everywhere, from rank 0 alone, and module by module."""
    world = dist.get_world_size()
    reference = models.build(kind, world, seed=11)
    weights, expected = models.whole_weights(reference), losses(reference)
    state = weights_by(kind)(seed=11).state_dict()
    rank0: Any = state if dist.get_rank() == 0 else None
    sources = {"file": path, "mapping": state}
    if kind not in ("plain", "ddp"):
        sources["rank 0"] = rank0
    for how, source in sources.items():
        model = materialized(kind, source)
        assert all(torch.equal(weights[name], tensor) for name, tensor in models.whole_weights(model).items()), how
        assert all(torch.equal(a, b) for a, b in zip(losses(model), expected, strict=True)), how
    torch.manual_seed(5)
    whole = weights_by(kind)()
    torch.manual_seed(5)
    for module in whole.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    made = materialized(kind, None, seed=5)
    return all(torch.equal(whole.get_parameter(name), tensor) for name, tensor in models.whole_weights(made).items())


@pytest.mark.parametrize(("kind", "world"), KINDS)
def test_weights_and_losses_are_those_of_a_model_that_was_built_whole(kind: str, world: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(weights_by(kind)(seed=11).state_dict(), path)
    assert ranks.run(world, same_as_whole, kind, str(path)) == [True] * world


def tied_and_optimizer(path: str) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with shardow.meta_init():
        model = Model()
    model.layers[1].bias.requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": trainable[:1], "lr": 0.5}, {"params": trainable[1:], "weight_decay": 0.0}], lr=0.1
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shardow.materialize(model, path, optimizer=optimizer)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.rotary.table, torch.arange(4.0))
    assert model.rotary.calls.item() == 3
    held = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    assert held == [
        [id(p) for p in model.parameters() if p.requires_grad][:1],
        [id(p) for p in model.parameters() if p.requires_grad][1:],
    ]
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.01), (0.1, 0.0)]
    before = model.embed.weight.full_tensor().clone()
    model(torch.arange(6)).sum().backward()
    optimizer.step()
    return bool((model.embed.weight.full_tensor() != before).any())


def test_ties_tables_and_optimizers_survive_sharding(tmp_path: Path) -> None:
    shardow.save(Model(), tmp_path / "a.safetensors")
    assert ranks.run(2, tied_and_optimizer, str(tmp_path / "a.safetensors")) == [True, True]


def test_a_file_that_has_both_names_of_a_tied_weight(tmp_path: Path) -> None:
    whole = Model()
    shardow.save(whole.state_dict(), tmp_path / "a.safetensors")
    assert "head.weight" in shardow.open(tmp_path / "a.safetensors")
    with shardow.meta_init():
        model = Model()
    report = shardow.materialize(model, tmp_path / "a.safetensors")
    assert report["missing"] == report["unexpected"] == report["kept"] == []
    assert torch.equal(model.head.weight, whole.head.weight)
    assert model.head.weight is model.embed.weight


def refused(path: str) -> list[str]:
    """Errors leave the model on meta and the optimizer as it was; then a good source works."""
    with shardow.meta_init():
        model = models.make_even()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bound = [id(p) for p in optimizer.param_groups[0]["params"]]
    models.PARALLEL["fsdp2"](model, dist.get_world_size())
    state = models.make_even().state_dict()
    wrong = {**state, "0.weight": torch.zeros(3), "extra": torch.zeros(1)}
    del wrong["4.bias"]
    told = []
    for source in (
        path + "nothing.safetensors",
        path,
        wrong,
        wrong if dist.get_rank() == 0 else None,
        state if dist.get_rank() else None,
    ):
        with pytest.raises((shardow.Error, FileNotFoundError)) as error:
            shardow.materialize(model, source, optimizer=optimizer, timeout=60)
        told.append(str(error.value))
        assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == bound
    shardow.materialize(model, state, optimizer=optimizer)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    return told


def test_what_does_not_fit_leaves_model_and_optimizer_as_they_were(tmp_path: Path) -> None:
    save_file({"other": torch.zeros(1)}, tmp_path / "a.safetensors")
    for told in ranks.run(2, refused, str(tmp_path / "a.safetensors")):
        assert "nothing.safetensors" in told[0]
        assert "missing in the file" in told[1]
        for text in told[2:4]:
            assert "'0.weight' has shape [3] in the source and [8, 6] here" in text
            assert "missing in the source: 4.bias" in text
            assert "unexpected in the source: extra" in text
        assert "ranks have different sources: nothing, a mapping" in told[4]


def test_an_initialisation_by_a_function_and_one_that_nobody_knows() -> None:
    with shardow.meta_init():
        model = nn.Sequential(nn.Linear(2, 3), Model())
    shardow.materialize(
        model,
        lambda module: (
            [p.fill_(7) for p in module.parameters(recurse=False)] + [b.fill_(2) for b in module.buffers(recurse=False)]
        ),
    )
    assert all((p == 7).all() for p in model.parameters())
    with torch.device("meta"):
        model = Model()
    model.rotary.table = model.rotary.original = torch.arange(4.0)
    with pytest.raises(ValueError, match=r"no reset_parameters\(\) in rotary \(Rotary\)"):
        shardow.materialize(model)
    assert all(p.is_meta for p in model.parameters())
    with shardow.meta_init():
        model = Model()
    shardow.materialize(model)
    assert model.rotary.calls == 3


def test_a_model_that_has_all_its_values_is_not_initialised_again_by_chance() -> None:
    model = nn.Linear(2, 3)
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match="has its values already; give a source"):
        shardow.materialize(model)
    with pytest.raises(ValueError, match="'weight' is on meta, without values"):
        shardow.materialize(model, {"weight": model.weight.to("meta"), "bias": model.bias})
    assert torch.equal(model.weight, before)
    shardow.materialize(model, lambda module: module.reset_parameters())  # asked for
    assert not torch.equal(model.weight, before)


def test_values_are_cast_where_memory_is_given(tmp_path: Path) -> None:
    state = models.make_even().state_dict()
    with shardow.meta_init():
        model = models.make_even()
    shardow.materialize(model, state, dtype=torch.bfloat16)
    assert all(torch.equal(p, state[name].bfloat16()) for name, p in model.named_parameters())


def test_a_table_that_was_made_on_meta_is_an_error_that_names_it() -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.raises(
        ValueError,
        match=r"on meta, without values: rotary.original, rotary.table; build the model under shardow\.meta_init\(\)",
    ):
        shardow.materialize(model, {})


def test_what_it_sees_of_constructors_is_what_they_do_and_not_its_own_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardow.start.recorded import Recorder

    calls = []
    see = Recorder.__torch_function__

    def seen(self: Recorder, func: Any, *rest: Any) -> Any:
        calls.append(func)
        return see(self, func, *rest)

    monkeypatch.setattr(Recorder, "__torch_function__", seen)
    with shardow.meta_init():
        nn.Linear(4, 4)
    assert len(calls) <= 20


def test_weights_that_to_empty_and_a_source_filled_have_values() -> None:
    with shardow.meta_init():
        layer = nn.Linear(2, 2)
    shardow.to_empty(layer)
    shardow.materialize(layer, {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    assert shardow.materialize(layer, {"weight": torch.zeros(2, 2)}, strict=False)["missing"] == ["bias"]
    assert layer.bias.tolist() == [1, 1]


class Tying(nn.Module):
    """Ties its weights in a method, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def tie_weights(self) -> None:
        self.other = self.first


def test_tie_weights_of_a_model_is_called_once_it_has_memory() -> None:
    with shardow.meta_init():
        model = Tying()
    shardow.materialize(model, {"first": torch.ones(3), "other": torch.ones(3)})
    assert model.other is model.first
    assert model.first.tolist() == [1, 1, 1]


@pytest.mark.parametrize("tensors", [1, 2, 100])
def test_model_without_enough_memory_is_on_meta_again_with_its_ties(
    tensors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for so many tensors; for all, a source that does not fit."""
    with shardow.meta_init():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
    made, empty_like = iter(range(100)), meta.empty_like

    def empty_until(tensor: torch.Tensor, *where: Any) -> torch.Tensor:
        if where[0] != "meta" and next(made) >= tensors:
            raise MemoryError
        return empty_like(tensor, *where)

    monkeypatch.setattr(meta, "empty_like", empty_until)
    with pytest.raises((MemoryError, ValueError)):
        shardow.materialize(model, {"0.weight": torch.ones(3, 3)})
    assert all(param.is_meta for param in model.parameters())
    assert model[1].weight is model[0].weight
