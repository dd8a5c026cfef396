"""Memory that Shardow makes for itself lies on the host, whatever torch's default device is, and stays usable after
inference mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import PARALLEL, make
from ranks import run
from torch import nn

import shardow


class Noted(nn.Module):
    """Puts a tensor into the state_dict() of its model beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.note = torch.arange(3.0)

    def get_extra_state(self) -> torch.Tensor:
        return self.note

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.note = state


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], Any]] = {
    "set_default_device": default_device, "with device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
}  # fmt: skip


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def use_everything(name: str, folder: Path) -> None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    made = [nn.Sequential(make(seed=seed), Noted()) for seed in (0, 1, 2)]
    model, other, plain = (*(PARALLEL["fsdp2" if world > 1 else "plain"](each, world) for each in made[:2]), made[2])
    optimizer, beside = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other))
    ema = shardow.EMA(model, decay=0.5, optimizer=optimizer)
    train(model, optimizer)
    pickled = folder / "weights.pt"
    if world == 1:
        torch.save({"w": torch.ones(3)}, pickled)
        dcp.save({"w": torch.ones(3)}, checkpoint_id=folder / "dcp", no_dist=True)
    steps = shardow.Checkpoints(folder / "run")
    train(other, beside)
    with MODES[name]():
        ema.async_save(folder / "averages.safetensors").wait()
        averages = ema.full_state_dict()
        shardow.save(model, folder / "model.safetensors")
        shardow.load(other, folder / "model.safetensors")
        shardow.full_state_dict(model)
        ema.copy_to(plain)
        steps.save(1, model=model, averages=ema, optimizer=optimizer, state={"tensor": torch.ones(2, device="cpu")})
        assert steps.restore(other, "skip", beside)["tensor"].sum() == 2
        if world == 1:
            shardow.merge([pickled, folder / "dcp"], folder / "merged.safetensors")
        read = dict(shardow.open(folder / "averages.safetensors"))
    fresh = make(seed=2)
    with torch.device("meta"):
        empty = make()
    with MODES[name]():
        source = fresh.state_dict() if not dist.is_initialized() or dist.get_rank() == 0 else None
        shardow.materialize(empty, source, group=dist.group.WORLD if world > 1 else None)
    train(other, beside)
    assert all(torch.equal(a, b) for a, b in zip(empty.state_dict().values(), fresh.state_dict().values(), strict=True))
    for key, full in averages.items():
        assert torch.equal(full, plain.state_dict()[key])
        assert key not in read or torch.equal(full, read[key])
        if not key.endswith("_extra_state"):
            full.mul_(2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # by dcp.save
@pytest.mark.parametrize("name", MODES)
def test_default_device_and_inference_mode_keep_memory_on_host(name: str, tmp_path: Path) -> None:
    use_everything(name, tmp_path)


def test_ranks_with_a_default_device_keep_memory_on_host(tmp_path: Path) -> None:
    run(2, use_everything, "with device", tmp_path)
