"""A save that knows what the last one worked out: whatever has changed of the model since is in the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

import shardow
from shardow.sharding import storage


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def moved(model: nn.Module) -> None:
    for one in model.parameters():
        one.data = one.data.clone() + 1


def replaced(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.ones(5, 3) * 7)  # type: ignore[index]


def reshaped(model: nn.Module) -> None:
    model[1] = nn.Linear(5, 3)  # type: ignore[operator]


def transposed(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data.t().contiguous().t()  # type: ignore[index]


CHANGES: list[Callable[[nn.Module], object]] = [
    moved,
    replaced,
    reshaped,
    transposed,
    lambda model: model.double(),
    lambda model: model[0].bfloat16(),  # type: ignore[index]
    lambda model: model.register_buffer("more", torch.arange(4.0)),
    lambda model: delattr(model[0], "bias"),  # type: ignore[index]
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_changed_since_the_last_save_is_in_the_next(
    change: Callable[[nn.Module], object], one_by_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if one_by_one:  # as where some tensor is not plain memory
        monkeypatch.setattr(storage, "device_of", lambda tensor: tensor.device)
    model, path = small(), tmp_path / "a.safetensors"
    for _ in range(2):
        shardow.save(model, path)
    change(model)
    for _ in range(2):
        shardow.save(model, path)
        with shardow.open(path) as found:
            assert dict(found).keys() == model.state_dict().keys()
            for name, value in model.state_dict().items():
                assert found[name].dtype == value.dtype
                assert torch.equal(found[name], value), name


def on_ranks(kind: str, path: str) -> list[bool]:
    """Averages that are saved after each step, by ranks of which one has its weights elsewhere then."""
    model = models.build(kind, dist.get_world_size())
    ema, same = shardow.EMA(model, 0.5), []
    for _ in range(3):
        for one in model.parameters():
            one.data.add_(1.0)
        ema.update()
        ema.save(path)
        shardow.save(model, path + ".model")
        kept = ema.full_state_dict(complete=False)
        if dist.get_rank() == 0:
            with shardow.open(path) as found:
                same.append(
                    all(torch.equal(found[name], value) for name, value in kept.items())
                    and len(kept) == len(dict(found))
                )
    shardow.load(model, path + ".model")
    return same


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_averages_of_each_step_are_in_its_file(kind: str, tmp_path: Path) -> None:
    assert ranks.run(2, on_ranks, kind, str(tmp_path / "a"))[0] == [True] * 3
