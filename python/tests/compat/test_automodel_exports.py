"""NeMo Automodel: the ways out to inference."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from automodel_managers import made, wander
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardow
from shardow.compat.automodel import EMAManager
from shardow.compat.files import torch_files


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
        patched.setattr(torch_files, "_add", full)
        with pytest.raises((OSError, shardow.Error)) as told:
            manager.export_shadow(path)
    return str(told.value)


def test_gap_5_a_full_disk_is_an_error_on_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    assert all("No space left" in text for text in ranks.run(2, _export_fails, str(tmp_path)))
    assert os.listdir(tmp_path) == []
