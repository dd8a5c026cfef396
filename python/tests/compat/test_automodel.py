"""compat.automodel: the origin's two managers by their formula, their checkpoints, and the gaps that SEEDS lists for it, one test each."""

from __future__ import annotations

import copy
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import walks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shardow
from shardow.compat import _pt_file
from shardow.compat.automodel import EMAManager, ShardedModelEMAManager, build_ema
from shardow.model.piece import Piece

DECAYS = (0.9, 0.9999)
Manager = EMAManager | ShardedModelEMAManager
BOTH = ("shadow", "sharded_model")


def made(kind: str, model: nn.Module, decay: float = 0.5, build: Callable[[], nn.Module] = models.make) -> Manager:
    return EMAManager(model, decay) if kind == "shadow" else ShardedModelEMAManager(build(), model, decay)


def local(tensor: torch.Tensor) -> torch.Tensor:
    memory: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return memory.detach()


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): p for name, p in model.named_parameters() if p.requires_grad}


def wander(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                local(p).add_(torch.randn(local(p).shape, generator=generator).to(p.dtype), alpha=0.1)


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(local(a[name]), local(b[name])) for name in a)


# ---- the same numbers


def _sharded(name: str, kind: str) -> nn.Module:
    model = walks.model(name).to(memory_format=torch.contiguous_format)  # as fully_shard() wants it
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        alone = {p for p in model.parameters() if p.ndim == 0}
        for child in model.children():
            if any(True for _ in child.parameters()):
                fully_shard(child)
        fully_shard(model, ignored_params=alone)
    return model


def _walks(kind: str, names: tuple[str, ...], steps: int) -> None:
    for name in names:
        model = _sharded(name, kind)
        managers: list[tuple[float, Manager]] = [(d, EMAManager(model, d)) for d in DECAYS]
        managers.append((DECAYS[0], ShardedModelEMAManager(_sharded(name, kind), model, DECAYS[0])))
        split = EMAManager(model, DECAYS[0], replicas="split")
        parameters = trained(model)
        expected = {d: {key: local(p).clone() for key, p in parameters.items()} for d in DECAYS}
        for _ in walks.walk(model, name, steps):
            for _, manager in managers:
                manager.update(model)
            split.update(model)
            for d, shadows in expected.items():
                for key, shadow in shadows.items():
                    shadow.mul_(d).add_(local(parameters[key]), alpha=1.0 - d)
        for d, manager in managers:
            state = manager.state_dict()
            assert all(torch.equal(local(state[key]), shadow) for key, shadow in expected[d].items()), (name, kind, d, type(manager))
        together = split._ema.full_state_dict(complete=False)
        apart = managers[0][1]._ema.full_state_dict(complete=False)  # type: ignore[union-attr]
        assert same(together, apart)


def test_1000_steps_alone_equal_the_formula_bit_for_bit() -> None:
    _walks("plain", walks.NAMES, walks.STEPS)


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_1000_steps_on_ranks_equal_the_formula_bit_for_bit(kind: str) -> None:
    for world in (1, 2, 4):
        ranks.run(world, _walks, kind, walks.NAMES, walks.STEPS if world == 2 or os.environ.get("SHARDOW_ALL") else 50)


def _every_sharding(kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        model = models.build(kind, dist.get_world_size())
        manager = EMAManager(model, 0.9)
        expected = models.whole_weights(model)
        for step in range(3):
            wander(model, step)
            manager.update(model)
            for key, weight in models.whole_weights(model).items():
                expected[key].mul_(0.9).add_(weight, alpha=1.0 - 0.9)
        full = manager._ema.full_state_dict(complete=False)
        assert dist.get_rank() or same(full, expected), kind
        assert kind.startswith("fsdp1") or not any(isinstance(tensor, Piece) for tensor in manager._shadow.values()), kind


def test_every_sharding_averages_alike_and_looks_like_its_weights() -> None:
    ranks.run(4, _every_sharding, tuple(models.PARALLEL))


def _fsdp1_pairs() -> None:
    for kind in ("fsdp1", "fsdp1-flat", "fsdp1-no-shard"):
        model, second = models.build(kind, 2), models.build(kind, 2, seed=5)
        manager, shadow = ShardedModelEMAManager(second, model, 0.9), EMAManager(model, 0.9)
        wander(model)
        for one in (manager, shadow):
            one.update(model)
        state = manager.state_dict()
        assert set(state) == set(models.make().state_dict())
        for key, average in shadow.state_dict().items():
            assert torch.equal(state[key], average), (kind, key)
        assert [tuple(e.shape) for e, _ in manager._param_pairs] == [tuple(p.shape) for _, p in manager._param_pairs]


def test_a_second_model_under_fsdp1_is_paired_by_name_and_region() -> None:
    ranks.run(2, _fsdp1_pairs)


# ---- the face


@pytest.mark.parametrize("kind", BOTH)
def test_the_face_is_the_origins(kind: str) -> None:
    model = models.make()
    model[0].bias.requires_grad_(False)
    manager = made(kind, model)
    assert manager.use_distributed_checkpointing is type(manager).use_distributed_checkpointing is True
    assert len(manager) == len(trained(model))
    assert "0.weight" in manager
    assert "_orig_mod.0.weight" in manager
    assert "0.bias" not in manager
    if isinstance(manager, ShardedModelEMAManager):
        assert manager._tracked_names == list(trained(model))
        assert all(e.shape == p.shape and p.requires_grad for e, p in manager._param_pairs)
        assert not manager.ema_model.training
        assert not any(p.requires_grad for p in manager.ema_model.parameters())
        assert set(manager.state_dict()) == set(model.state_dict())
    else:
        assert list(manager._shadow) == list(trained(model))
        state = manager.state_dict()
        state["0.weight"].zero_()
        assert manager._shadow["0.weight"].any()
        assert not manager._shadow["0.weight"].requires_grad


@pytest.mark.parametrize("kind", BOTH)
def test_misuse_raises_the_origins_exceptions(kind: str) -> None:
    for decay in (-0.1, 1.1):
        with pytest.raises(ValueError, match=r"decay must be in \[0, 1\]"):
            made(kind, models.make(), decay)
    manager = made(kind, models.make())
    state = dict(manager.state_dict())
    with pytest.raises(KeyError if kind == "shadow" else RuntimeError, match="unexpected 'extra'"):
        manager.load_state_dict({**state, "extra": torch.ones(1)})
    with pytest.raises(KeyError if kind == "shadow" else RuntimeError, match=r"missing '0.weight'"):
        manager.load_state_dict({name: value for name, value in state.items() if name != "0.weight"})


def test_models_that_differ_raise_the_origins_exceptions() -> None:
    with pytest.raises(KeyError, match=r"lacks parameters of the train model: \['8.weight'"):
        ShardedModelEMAManager(models.make(), nn.Sequential(*models.make(), nn.Linear(4, 2)))
    wider = models.make()
    wider[6] = nn.Linear(1, 5)
    with pytest.raises(ValueError, match=r"6.weight: train=\(5, 1\) ema=\(4, 1\)"):
        ShardedModelEMAManager(models.make(), wider)


# ---- checkpoints


def _origin_saves(path: str, dtype: torch.dtype) -> None:
    """By the origin's formulas: shadows of the parameters' dtype, and its Checkpointer's plain dcp.save()."""
    model = models.build("fsdp2", dist.get_world_size(), dtype)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    wander(model)
    for name, p in model.named_parameters():
        shadow[name].mul_(0.5).add_(p.detach(), alpha=0.5)
    dcp.save(shadow, checkpoint_id=path, planner=DefaultSavePlanner(enable_plan_caching=True))
    second = models.build("fsdp2", dist.get_world_size(), dtype)
    dcp.save(second.state_dict(), checkpoint_id=path + "-sharded")


def _origin_loads(path: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """As its Checkpointer does, on its own template."""
    model = models.build("fsdp2", dist.get_world_size(), dtype)
    template = {name: torch.zeros_like(p).detach() for name, p in model.named_parameters()}
    dcp.load(template, checkpoint_id=path)
    return {name: value.full_tensor() for name, value in template.items()}


def _we_load_and_save(path: str, kind: str, implementation: str) -> dict[str, torch.Tensor]:
    model = models.build(kind, dist.get_world_size(), seed=3)
    build = lambda: models.build(kind, dist.get_world_size(), seed=4)  # noqa: E731
    manager = made(implementation, model, build=build)
    manager.load(path + ("" if implementation == "shadow" else "-sharded"))
    loaded = made(implementation, model, build=build)  # and the way of the origin's Checkpointer
    template = loaded.state_dict()
    dcp.load(template, checkpoint_id=path + ("" if implementation == "shadow" else "-sharded"))
    loaded.load_state_dict(template)
    assert same(manager.state_dict(), loaded.state_dict())
    manager.save(f"{path}-{kind}-{implementation}")
    return {} if isinstance(manager, ShardedModelEMAManager) else manager._ema.full_state_dict(complete=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpoints_go_both_ways_between_the_origin_and_us(tmp_path: Path, dtype: torch.dtype) -> None:
    path = str(tmp_path / "ema")
    ranks.run(2, _origin_saves, path, dtype)
    theirs = ranks.run(2, _origin_loads, path, dtype)[0]
    for kind in ("fsdp2", "fsdp1", "ddp"):
        for world in (1, 3) if kind == "fsdp2" and dtype == torch.float32 else (2,):
            ours = ranks.run(world, _we_load_and_save, path, kind, "shadow")[0]
            assert all(torch.equal(ours[name], tensor.float()) for name, tensor in theirs.items())
            back = ranks.run(2, _origin_loads, f"{path}-{kind}-shadow", dtype)[0]
            assert same(back, theirs)
    ranks.run(2, _we_load_and_save, path, "fsdp2", "sharded_model")
    back = ranks.run(2, _origin_loads, f"{path}-fsdp2-sharded_model", dtype)[0]
    weights = dict(models.make(dtype).named_parameters())
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())


def _uneven(path: str) -> dict[str, torch.Tensor]:
    """Checkpoints go by the offsets that torch tells: averages are DTensors only where these are right."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    EMAManager(model).save(path)
    return models.whole_weights(model)


def test_checkpoints_of_uneven_tensor_parallelism_are_right(tmp_path: Path) -> None:
    expected = ranks.run(4, _uneven, str(tmp_path / "ema"))[0]
    manager = EMAManager(nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3)))
    manager.load(tmp_path / "ema")
    assert same(manager.state_dict(), expected)


@pytest.mark.parametrize("kind", BOTH)
def test_a_resumed_training_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    model = models.make()
    manager = made(kind, model)
    wander(model, 1)
    manager.update(model)
    manager.save(tmp_path / "ema")
    torch.save(manager.state_dict(), tmp_path / "state.pt")
    resumed, third = made(kind, copy.deepcopy(model)), made(kind, copy.deepcopy(model))
    assert resumed.load(tmp_path / "ema") == ([], [])
    assert resumed.updates == 1
    third.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for one in (manager, resumed, third):
        moved = one._model if isinstance(one, EMAManager) else one._train_model
        wander(moved, 2)
        one.update(moved)
        assert same(one.state_dict(), manager.state_dict())


# ---- the gaps


@pytest.mark.filterwarnings("ignore:decay")
def test_gap_1_averages_of_bfloat16_weights_are_float32_and_move() -> None:
    model = models.make(torch.bfloat16)
    manager, second = EMAManager(model, 0.9999), ShardedModelEMAManager(models.make(), model, 0.9999)
    begin, expected = manager.state_dict(), {name: p.detach().float() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05)
    for _ in range(300):
        for one in (manager, second):
            one.update(model)
        for name, p in model.named_parameters():
            expected[name].mul_(0.9999).add_(p.detach(), alpha=1 - 0.9999)
    assert same(manager.state_dict(), expected)
    assert all(torch.equal(second.state_dict()[name], tensor) for name, tensor in expected.items())
    assert all(bool((manager._shadow[name] != tensor).all()) for name, tensor in begin.items())
    with pytest.warns(RuntimeWarning, match="rounded to nearest"):
        ShardedModelEMAManager(models.make(torch.bfloat16), model, 0.9999)
    assert EMAManager(models.make(torch.float64))._shadow["0.weight"].dtype == torch.float64


@pytest.mark.parametrize("kind", BOTH)
def test_gap_2_names_that_gain_a_prefix_are_still_averaged(kind: str) -> None:
    model = models.make()
    manager = made(kind, model)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = list(expected)
    model[0] = checkpoint_wrapper(model[0])
    for step, wrapped in enumerate((model, torch.compile(model, backend="eager"))):
        wander(model, step)
        manager.update(wrapped)
        for name, p in zip(names, model.parameters(), strict=True):
            expected[name].mul_(0.5).add_(p.detach(), alpha=0.5)
    assert all(torch.equal(manager.state_dict()[name], tensor) for name, tensor in expected.items())


def test_gap_2_a_parameter_that_is_unfrozen_later_is_an_error_with_a_way_out() -> None:
    model = models.make()
    model[3].weight.requires_grad_(False)
    manager = EMAManager(model, 0.5)
    wander(model)
    manager.update(model)
    model[3].weight.requires_grad_(True)
    before = manager.state_dict()
    with pytest.raises(ValueError, match=r"'3.weight' and 0 more are trained.*strict=False"):
        manager.update(model)
    assert same(manager.state_dict(), before)
    again = EMAManager(model, 0.5)
    with pytest.warns(UserWarning, match=r"missing '3.weight'"):
        assert again.load_state_dict(before, strict=False) == (["3.weight"], [])
    again.update(model)
    second = ShardedModelEMAManager(models.make(), model, 0.5)
    model[6].bias.requires_grad_(False)
    second.update(model)
    assert "6.bias" in second  # once averaged, for good


@pytest.mark.parametrize("kind", BOTH)
def test_gap_3_replaced_parameters_are_found_again(kind: str) -> None:
    model = models.make()
    manager = made(kind, model)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict({name: value.clone() + 1 for name, value in model.state_dict().items()}, assign=True)
    manager.update(model)
    for name, p in model.named_parameters():
        assert torch.equal(manager.state_dict()[name], expected[name].mul_(0.5).add_(p.detach(), alpha=0.5))
    model[6] = nn.Linear(1, 5)
    before = copy.deepcopy(dict(manager.state_dict()))
    with pytest.raises(ValueError, match=r"'6.weight'"):
        manager.update(model)
    del model[6], model[6]
    with pytest.raises((KeyError, RuntimeError), match=r"'6.bias'|'6.weight'"):
        manager.update(model)
    assert same(manager.state_dict(), before)


def _sharded_later() -> None:
    model = models.make()
    manager = EMAManager(model, 0.5)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    models.PARALLEL["fsdp2"](model, 2)
    wander(model)
    manager.update(model)
    for name, weight in models.whole_weights(model).items():
        expected[name].mul_(0.5).add_(weight, alpha=0.5)
    full = manager._ema.full_state_dict(complete=False)
    assert dist.get_rank() or same(full, expected)
    assert all(isinstance(tensor, DTensor) for tensor in manager._shadow.values())


def test_gap_3_a_model_may_be_sharded_after_its_averages_were_made() -> None:
    ranks.run(2, _sharded_later)


def test_gap_3_a_second_model_begins_as_the_first_and_its_buffers_follow() -> None:
    model = models.make(seed=1)
    model[3].weight.requires_grad_(False)
    manager = ShardedModelEMAManager(models.make(seed=2), model, 0.5)
    assert same(manager.state_dict(), model.state_dict())
    frozen = model[3].weight.detach().clone()
    for step in range(2):
        wander(model, step)
        model(torch.randn(8, models.INPUTS))
        manager.update(model)
    for name in ("7.running_mean", "7.running_var", "7.num_batches_tracked"):
        assert torch.equal(manager.state_dict()[name], model.state_dict()[name])
    assert torch.equal(manager.state_dict()["3.weight"], frozen)


@pytest.mark.parametrize("kind", BOTH)
def test_gap_4_everything_is_checked_before_anything_is_written(kind: str, tmp_path: Path) -> None:
    manager = made(kind, models.make())
    before = copy.deepcopy(dict(manager.state_dict()))
    good = {name: torch.full_like(value, 7) for name, value in before.items()}
    for wrong, says in (
        ({"6.bias": torch.ones(1)}, r"'6.bias' has shape \(1,\) there and \(4,\) here"),
        ({"6.bias": torch.ones(4, dtype=torch.int64)}, r"'6.bias' is torch.int64 there and torch.float32 here"),
    ):
        with pytest.raises(RuntimeError, match=says):
            manager.load_state_dict({**good, **wrong})
        dcp.save({**good, **wrong}, checkpoint_id=tmp_path / says[8:14])
        with pytest.raises(ValueError, match=r"'6.bias' is"):
            manager.load(tmp_path / says[8:14])
        assert same(manager.state_dict(), before)
    del good["6.bias"]
    with pytest.warns(UserWarning, match=r"missing '6.bias'"):
        assert manager.load_state_dict({**good, "more": torch.ones(1)}, strict=False) == (["6.bias"], ["more"])
    assert torch.equal(manager.state_dict()["6.bias"], before["6.bias"])
    assert torch.equal(manager.state_dict()["6.weight"], good["6.weight"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(9, 6), models.make(), nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.body[3].bias.requires_grad_(False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def _exports(path: str, sharding: str, kind: str) -> dict[str, torch.Tensor]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Tied()
        if sharding == "fsdp2":
            return fully_shard(model)
        model.body = models.PARALLEL[sharding](model.body, dist.get_world_size())
        return model

    model = build()
    manager = made(kind, model, build=build)
    wander(model)
    manager.update(model)
    assert manager.export_safetensors(path).name == "ema.safetensors"
    manager.export_shadow(path)
    manager.export_shadow(path + "-half", dtype="bfloat16")
    if isinstance(manager, EMAManager):
        return manager._ema.full_state_dict(complete=True)
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in manager.state_dict().items()}
    return full if dist.get_rank() == 0 else {}


@pytest.mark.parametrize(
    ("sharding", "kind"),
    [
        ("fsdp2", "shadow"),
        ("fsdp2", "sharded_model"),
        ("fsdp1", "shadow"),
        ("plain", "shadow"),
        ("plain", "sharded_model"),
        ("ddp", "shadow"),
    ],
)
def test_gap_5_ways_out_to_inference(tmp_path: Path, sharding: str, kind: str) -> None:
    averages = ranks.run(2, _exports, str(tmp_path), sharding, kind)[0]
    transformer = Tied()
    state = torch.load(tmp_path / "ema_shadow.pt", weights_only=True)  # generate.py
    assert zipfile.ZipFile(tmp_path / "ema_shadow.pt").testzip() is None
    assert torch.load(tmp_path / "ema_shadow.pt", mmap=True, weights_only=True).keys() == state.keys()
    transformer.load_state_dict(state, strict=True)
    assert transformer.head.weight is transformer.embed.weight
    file = load_file(tmp_path / "ema.safetensors")
    for name, average in averages.items():
        assert torch.equal(state[name], average), name
        assert torch.equal(file.get(name, state["embed.weight"]), average), name
    halves = torch.load(Path(str(tmp_path) + "-half") / "ema_shadow.pt", weights_only=True)
    assert all(torch.equal(halves[name], t.bfloat16() if t.is_floating_point() else t) for name, t in state.items())
    assert sorted(os.listdir(tmp_path)) == ["ema.safetensors", "ema_shadow.pt"]


def _export_fails(path: str) -> str:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    manager = EMAManager(models.build("fsdp2", 2))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_pt_file._File, "add", full)
        with pytest.raises((OSError, shardow.Error)) as told:
            manager.export_shadow(path)
    return str(told.value)


def test_gap_5_a_full_disk_is_an_error_on_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    assert all("No space left" in text for text in ranks.run(2, _export_fails, str(tmp_path)))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", BOTH)
def test_gap_6_turning_averages_on_for_an_older_checkpoint_is_a_choice(tmp_path: Path, kind: str) -> None:
    model = models.make()
    manager = made(kind, model)
    wander(model)
    with pytest.raises(FileNotFoundError, match=r"missing='init'"):
        manager.load(tmp_path / "ema")
    with pytest.warns(UserWarning, match="not everything was loaded"):
        manager.load(tmp_path / "ema", missing="init")
    assert all(torch.equal(manager.state_dict()[name], p) for name, p in model.named_parameters())
    state = {name: torch.full_like(p, 3) for name, p in model.named_parameters() if name != "0.weight"}
    dcp.save(state, checkpoint_id=tmp_path / "ema")
    with pytest.raises(KeyError, match=r"missing '0.weight'"):
        manager.load(tmp_path / "ema")
    with pytest.warns(UserWarning, match=r"missing '0.weight'"):
        manager.load(tmp_path / "ema", missing="init")
    assert torch.equal(manager.state_dict()["0.weight"], model[0].weight)
    assert torch.equal(manager.state_dict()["0.bias"], state["0.bias"])
    with pytest.raises(ValueError, match="missing='perhaps'"):
        manager.load(tmp_path / "ema", missing="perhaps")


@pytest.mark.parametrize("kind", BOTH)
def test_gap_6_decay_and_updates_are_stored(tmp_path: Path, kind: str) -> None:
    manager = made(kind, models.make(), 0.75)
    for _ in range(3):
        manager.update(manager._model if isinstance(manager, EMAManager) else manager._train_model)
    manager.save(tmp_path / "ema")
    other = made(kind, models.make(), 0.5)
    with pytest.warns(UserWarning, match="decay 0.75; it goes on with 0.5"):
        other.load(tmp_path / "ema")
    assert other.updates == other.stats()["updates"] == 3
    manager.save(tmp_path / "ema")  # replaces
    assert os.listdir(tmp_path) == ["ema"]


def _plans(path: str) -> None:
    model = models.build("fsdp2", 2)
    manager = EMAManager(model, 0.5)
    for step in range(2):
        wander(model, step)
        manager.update(model)
        dcp.save(model.state_dict(), checkpoint_id=f"{path}/model{step}", planner=DefaultSavePlanner(enable_plan_caching=True))
        manager.save(f"{path}/ema{step}")
        expected, weights = manager.state_dict(), {name: p.detach().clone() for name, p in model.named_parameters()}
        manager.load(f"{path}/ema{step}")
        assert same(manager.state_dict(), expected)
        dcp.load(found := {name: torch.zeros_like(p) for name, p in weights.items()}, checkpoint_id=f"{path}/model{step}")
        assert same(found, weights)


def test_gap_7_cached_plans_of_other_saves_are_not_ours(tmp_path: Path) -> None:
    ranks.run(2, _plans, str(tmp_path))


@pytest.mark.parametrize("kind", BOTH)
def test_gap_8_evaluation_in_a_block(kind: str) -> None:
    model = models.make()
    manager = made(kind, model)
    weights = copy.deepcopy(model.state_dict())
    wander(model)
    manager.update(model)
    live, averages = copy.deepcopy(model.state_dict()), copy.deepcopy(dict(manager.state_dict()))

    def evaluate() -> None:
        with manager.swapped() as averaged:
            assert all(torch.equal(p, averages[name]) for name, p in averaged.named_parameters())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    assert same(model.state_dict(), live)
    assert not torch.equal(averages["0.weight"], weights["0.weight"])
    if isinstance(manager, EMAManager):
        with manager.swapped(), pytest.raises(ValueError, match="inside swapped"):
            manager.state_dict()


@pytest.mark.parametrize("kind", BOTH)
def test_gap_8_a_step_of_nan_is_held(kind: str) -> None:
    model = models.make()
    manager = made(kind, model)
    before = copy.deepcopy(dict(manager.state_dict()))
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        manager.update(model)
    assert torch.equal(manager.state_dict()["0.weight"], before["0.weight"])
    assert manager.stats()["held_nonfinite"] == model[0].weight.numel()


# ---- the YAML section


@pytest.mark.parametrize("cfg", [None, {"decay": None}, {"decay": None, "implementation": "shadow"}, SimpleNamespace(decay=None)])
def test_no_section_or_no_decay_is_no_average(cfg: Any) -> None:
    assert build_ema(cfg, models.make()) is None


class Node:
    """As Automodel's ConfigNode gives itself."""

    def to_dict(self) -> dict[str, Any]:
        return {"decay": "0.75", "implementation": "auto"}


@pytest.mark.parametrize(
    ("cfg", "decay"), [({}, 0.9999), ({"decay": 0.75}, 0.75), (SimpleNamespace(decay=0.75, implementation="shadow"), 0.75), (Node(), 0.75)]
)
def test_sections_of_every_kind_are_read(cfg: Any, decay: float) -> None:
    found = build_ema(cfg, models.make())
    assert isinstance(found, EMAManager)
    assert found.decay == decay


def _auto() -> None:
    for sharding, init_mode, expected in (
        ("fsdp2", "hf_backbones", ShardedModelEMAManager),
        ("fsdp2", "auto", EMAManager),
        ("ddp", "hf_backbones", EMAManager),
    ):
        build = lambda sharding=sharding: models.build(sharding, 2)  # noqa: E731
        assert type(build_ema({"decay": 0.9}, build(), build, init_mode)) is expected


def test_auto_is_a_second_model_for_hf_backbones_under_fsdp2() -> None:
    ranks.run(2, _auto)


@pytest.mark.parametrize(
    ("cfg", "says"),
    [
        ({"decay": 0.9, "warmup": 3}, "unknown option.*warmup"),
        ({"decay": 0.9, "implementation": "fast"}, "Unsupported ema.implementation='fast'"),
        ({"decay": 0.9, "implementation": "sharded_model"}, "requires model.init_mode='hf_backbones'"),
        ({"decay": 2}, "decay must be in"),
        ({"decay": "much"}, "could not convert|not a number"),
        ({"decay": []}, "not a number"),
        (3, "ema is a int"),
    ],
)
def test_sections_that_make_no_sense_are_refused(cfg: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build_ema(cfg, models.make())
    with pytest.raises(ValueError, match="build_ema_model"):
        build_ema({"implementation": "sharded_model"}, models.make(), init_mode="hf_backbones")
