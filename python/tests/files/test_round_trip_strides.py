"""Tensors with strides, and models that a forward pass left unsharded, go to a file and back."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import ranks
import torch
from safetensors.torch import load_file
from test_round_trips import held, same, spoil
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardow


class Strided(nn.Module):
    """What ``.t()`` and channels_last leave behind: every element has a place, though not in order."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 5, generator=generator).t())
        self.register_buffer(
            "images", torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last)
        )


def strided(kind: str) -> nn.Module:
    return DistributedDataParallel(Strided()) if kind == "ddp" else Strided()


def save_strided(kind: str, path: str) -> None:
    shardow.save(strided(kind), path)


def load_strided(kind: str, path: str) -> list[str]:
    model, expected = strided(kind), dict(held(strided(kind), every_name=True))
    spoil(model, expected)
    shardow.load(model, path)
    return [
        name
        for name, tensor in held(model, every_name=True)
        if not same(tensor, expected[name]) or tensor.is_contiguous()
    ]


@pytest.mark.parametrize(("kind", "world"), [("plain", 1), ("ddp", 2)])
def test_a_modules_tensors_with_strides_go_to_a_file_and_back(kind: str, world: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    ranks.run(world, save_strided, kind, str(path))
    assert all(same(tensor, Strided().state_dict()[name]) for name, tensor in load_file(path).items())
    assert ranks.run(world, load_strided, kind, str(path)) == [[]] * world


def _after_inference(folder: str) -> None:
    model = models.build("fsdp2", 2)
    before = models.whole_weights(model)
    with torch.no_grad():
        model(torch.ones(2, models.INPUTS))
    assert not all(isinstance(p, DTensor) for p in model.parameters())
    shardow.save(model, f"{folder}/model.safetensors")
    with torch.no_grad():
        model(torch.ones(2, models.INPUTS))
    ema = shardow.EMA(model, 0.9)
    ema.update()
    full = ema.full_state_dict(complete=False)
    assert all(torch.equal(full[name], before[name]) for name in full)
    assert all(
        torch.equal(tensor, before[name])
        for name, tensor in shardow.open(f"{folder}/model.safetensors").items()
        if name in before
    )


def test_a_model_that_a_forward_without_backward_left_unsharded_is_found_sharded(tmp_path: Path) -> None:
    ranks.run(2, _after_inference, str(tmp_path))
