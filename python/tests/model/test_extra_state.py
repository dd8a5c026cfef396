"""What modules keep beside their tensors, and buffers that they register later, travel with the model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from own_averages import averages_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardow


class Counting(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def model(numbers: Any, text: Any) -> nn.Module:
    return nn.Sequential(Counting(numbers), nn.Linear(3, 3), Counting(text))


def full(tag: int) -> nn.Module:
    return model(torch.arange(tag, dtype=torch.uint8), {"scale": [1.5, tag], "name": "e4m3"})


def check(found: nn.Module, tag: int) -> None:
    assert torch.equal(found[0].state, torch.arange(tag, dtype=torch.uint8))
    assert found[2].state == {"scale": [1.5, tag], "name": "e4m3"}


def test_extra_states_travel_through_files(tmp_path: Path) -> None:
    for tag, path in ((4, tmp_path / "a.safetensors"), (7, tmp_path / "a.safetensors"), (5, tmp_path / "b")):
        shardow.save(full(tag), path)
        other = full(2)
        report = shardow.load(other, path)
        assert report["missing"] == report["unexpected"] == []
        check(other, tag)
        with shardow.meta_init():
            late = full(3)
        shardow.materialize(late, path)
        check(late, tag)


def test_extra_states_are_part_of_a_complete_model(tmp_path: Path) -> None:
    ema = shardow.EMA(full(6), decay=0.5)
    state = ema.full_state_dict(complete=True)
    other = full(2)
    other.load_state_dict(copy.deepcopy(state))
    check(other, 6)
    other[2].state["scale"][1] = -1
    check(averages_of(ema).view.model, 6)
    ema.export(tmp_path / "out")
    for source in (tmp_path / "out", state):
        target = full(2)
        shardow.materialize(target, source)
        check(target, 6)
    target = full(2)
    ema.copy_to(target)
    check(target, 6)
    shardow.save(state, tmp_path / "c.safetensors")
    target = full(2)
    shardow.load(target, tmp_path / "c.safetensors")
    check(target, 6)


def test_what_no_file_holds_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"'2\._extra_state' \(set\): not in the file"):
        shardow.save(model(torch.ones(2), {1, 2}), tmp_path / "a.safetensors")
    target = model(torch.ones(1), {3})
    with pytest.raises(ValueError, match=r"missing in the source: 2\._extra_state\. strict=False takes the rest"):
        shardow.load(target, tmp_path / "a.safetensors")
    assert torch.equal(target[0].state, torch.ones(1)), "nothing was loaded"
    assert shardow.load(target, tmp_path / "a.safetensors", strict=False)["missing"] == ["2._extra_state"]
    assert torch.equal(target[0].state, torch.ones(2))
    assert target[2].state == {3}


def test_extra_states_that_the_model_does_not_have_are_unexpected(tmp_path: Path) -> None:
    shardow.save(full(3), tmp_path / "a.safetensors")
    plain = nn.Sequential(full(1)[0], nn.Linear(3, 3), nn.ModuleDict({"layer": nn.Linear(3, 3)}))
    with pytest.raises(ValueError, match=r"unexpected in the source: 2\._extra_state"):
        shardow.load(plain, tmp_path / "a.safetensors")
    assert shardow.load(plain, tmp_path / "a.safetensors", strict=False)["unexpected"] == ["2._extra_state"]


def on_ranks(directory: str) -> None:
    rank = torch.distributed.get_rank()
    sharded = fully_shard(full(4 + rank), mesh=init_device_mesh("cpu", (2,)))
    shardow.save(sharded, f"{directory}/a")
    state = shardow.EMA(sharded).full_state_dict(complete=True)
    assert ("2._extra_state" in state) == (rank == 0)
    for source in (f"{directory}/a", state if rank == 0 else None):
        with shardow.meta_init():
            late = full(2)
        fully_shard(late, mesh=init_device_mesh("cpu", (2,)))
        shardow.materialize(late, source)
        check(late, 4)


def test_extra_states_of_sharded_models_are_rank_0s(tmp_path: Path) -> None:
    ranks.run(2, on_ranks, str(tmp_path))


def test_buffers_that_are_registered_later_are_exported(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    ema = shardow.EMA(net, decay=0.5)
    net[0].register_buffer("late", torch.arange(3.0))
    net[0].register_buffer("again", net[0].late)
    net[0].register_buffer("hidden", torch.arange(3.0), persistent=False)
    for _ in range(2):
        assert set(ema.full_state_dict(complete=True)) == set(net.state_dict())
    net[0].late.fill_(5)
    ema.export(tmp_path / "a.safetensors")
    assert torch.equal(shardow.open(tmp_path / "a.safetensors")["0.late"], torch.full((3,), 5.0))


def test_averages_of_buffers_go_on_when_another_one_is_registered() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    ema = shardow.EMA(net, 0.5, buffers="average")
    net.register_buffer("scale", torch.ones(2))
    assert torch.equal(ema.full_state_dict()["scale"], torch.ones(2))
    ema.update()
    net.register_buffer("table", torch.ones(2), persistent=False)
    ema.update()
    assert ema.step == 2


def test_a_copy_of_a_model_has_extra_states_of_its_own() -> None:
    source, target = full(6), full(2)
    shardow.EMA(source, 0.5).copy_to(target)
    target[2].state["scale"].append(3)
    check(source, 6)
