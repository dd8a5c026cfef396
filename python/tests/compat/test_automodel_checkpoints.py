"""NeMo Automodel's checkpoints: both ways between the origin and us, at once or not at all, with decay and updates; and
the ways out to inference."""

from __future__ import annotations

import copy
import os
import zipfile
from pathlib import Path

import models
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from automodel_managers import BOTH, made, same, wander
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardow
from shardow.compat.automodel import EMAManager, ShardedModelEMAManager


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


@pytest.mark.parametrize("kind", BOTH)
def test_gap_4_everything_is_checked_before_anything_is_written(kind: str, tmp_path: Path) -> None:
    manager = made(kind, models.make())
    before = copy.deepcopy(dict(manager.state_dict()))
    good = {name: torch.full_like(value, 7) for name, value in before.items()}
    for wrong, says in (
        ({"6.bias": torch.ones(1)}, r"'6.bias' has shape \[1\] in the state and \[4\] here"),
        ({"6.bias": torch.ones(4, dtype=torch.int64)}, r"'6.bias' is torch.int64 in the state and torch.float32 here"),
    ):
        with pytest.raises(RuntimeError, match=says):
            manager.load_state_dict({**good, **wrong})
        dcp.save({**good, **wrong}, checkpoint_id=tmp_path / says[8:14])
        with pytest.raises(ValueError, match=says.replace("the state", ".*")):
            manager.load(tmp_path / says[8:14])
        assert same(manager.state_dict(), before)
    del good["6.bias"]
    with pytest.warns(UserWarning, match=r"missing in the state: 6.bias"):
        assert manager.load_state_dict({**good, "more": torch.ones(1)}, strict=False) == (["6.bias"], ["more"])
    assert torch.equal(manager.state_dict()["6.bias"], before["6.bias"])
    assert torch.equal(manager.state_dict()["6.weight"], good["6.weight"])


@pytest.mark.parametrize("kind", BOTH)
def test_gap_6_turning_averages_on_for_an_older_checkpoint_is_a_choice(tmp_path: Path, kind: str) -> None:
    model = models.make()
    manager = made(kind, model)
    wander(model)
    manager.update(model)
    wander(model)
    with pytest.raises(FileNotFoundError, match=r"missing='init'"):
        manager.load(tmp_path / "ema")
    with pytest.warns(UserWarning, match="not everything was loaded"):
        manager.load(tmp_path / "ema", missing="init")
    assert manager.updates == 0
    assert all(torch.equal(manager.state_dict()[name], p) for name, p in model.named_parameters())
    state = {name: torch.full_like(p, 3) for name, p in model.named_parameters() if name != "0.weight"}
    dcp.save(state, checkpoint_id=tmp_path / "ema")
    with pytest.raises(KeyError, match=r"missing in .*: 0.weight"):
        manager.load(tmp_path / "ema")
    with pytest.warns(UserWarning, match=r"missing in .*: 0.weight"):
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
    one_alone = {"shardow.decay": torch.tensor(0.75, dtype=torch.float64)}
    dcp.save({**manager.state_dict(), **one_alone}, checkpoint_id=tmp_path / "older")
    other.load(tmp_path / "older")
    assert other.updates == 0


def _plans(path: str) -> None:
    model = models.build("fsdp2", 2)
    manager = EMAManager(model, 0.5)
    for step in range(2):
        wander(model, step)
        manager.update(model)
        dcp.save(
            model.state_dict(),
            checkpoint_id=f"{path}/model{step}",
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
        manager.save(f"{path}/ema{step}")
        expected, weights = manager.state_dict(), {name: p.detach().clone() for name, p in model.named_parameters()}
        manager.load(f"{path}/ema{step}")
        assert same(manager.state_dict(), expected)
        dcp.load(
            found := {name: torch.zeros_like(p) for name, p in weights.items()}, checkpoint_id=f"{path}/model{step}"
        )
        assert same(found, weights)


def test_gap_7_cached_plans_of_other_saves_are_not_ours(tmp_path: Path) -> None:
    ranks.run(2, _plans, str(tmp_path))


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
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    manager = EMAManager(models.build("fsdp2", 2))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "from_file", full)
        with pytest.raises((OSError, shardow.Error)) as told:
            manager.export_shadow(path)
    return str(told.value)


def test_gap_5_a_full_disk_is_an_error_on_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    assert all("No space left" in text for text in ranks.run(2, _export_fails, str(tmp_path)))
    assert os.listdir(tmp_path) == []
