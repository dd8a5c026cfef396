"""A run that was stopped and goes on is the run that was not, bit for bit; on other numbers of ranks it begins with the
same bits.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import ranks
import torch
from runs import OPTIMIZERS, Run, equal, tensors_of
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import shardow

KINDS = ["plain", "ddp", "fsdp1", "fsdp1-flat", "fsdp2"]


#: One of each way to keep state: two moments, tensors as learning rates, none, sums.
SOME_OPTIMIZERS = ("adamw", "adamw-tensor-lr", "sgd", "adagrad")


def straight(kind: str, optimizer: str, out: Path, asynchronous: bool, freeze: str = "") -> None:
    """Saved after 3 steps and after 6."""
    run, checkpoints = Run(kind, optimizer, freeze=freeze), shardow.Checkpoints(out)
    run.train(3)
    run.save(checkpoints, asynchronous=asynchronous)
    run.train(3)
    run.save(checkpoints)


def resumed(kind: str, optimizer: str, out: Path, again: Path, freeze: str = "") -> None:
    """From step 3, by a run that began elsewhere; saved at once, and after 3 steps."""
    run, checkpoints = Run(kind, optimizer, seed=1, freeze=freeze), shardow.Checkpoints(again)
    run.train(1)
    assert run.restore(shardow.Checkpoints(out), step=3) == {"step": 3, "best": float("inf")}
    run.save(checkpoints)
    run.train(3)
    run.save(checkpoints)


def only_resumed(kind: str, optimizer: str, out: Path, again: Path) -> None:
    run = Run(kind, optimizer, seed=1)
    run.restore(shardow.Checkpoints(out), step=3, random=False)
    run.save(shardow.Checkpoints(again))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_run_that_was_not_stopped(kind: str, asynchronous: bool, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    ranks.run(2, straight, kind, "adamw", out, asynchronous)
    ranks.run(2, resumed, kind, "adamw", out, again)
    for step in ("step-000000003", "step-000000006"):
        assert equal(tensors_of(out / step), tensors_of(again / step)), step
    assert not equal(tensors_of(out / "step-000000003"), tensors_of(out / "step-000000006"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS if os.environ.get("SHARDOW_ALL") else SOME_OPTIMIZERS)
def test_every_optimizer_goes_on_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    ranks.run(2, straight, "fsdp2", optimizer, out, False)
    ranks.run(2, resumed, "fsdp2", optimizer, out, again)
    for step in ("step-000000003", "step-000000006"):
        assert equal(tensors_of(out / step), tensors_of(again / step)), step


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_frozen_parameters_have_no_state_and_everything_else_goes_on(kind: str, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    ranks.run(2, straight, kind, "adamw-one", out, False, "3.weight")
    ranks.run(2, resumed, kind, "adamw-one", out, again, "3.weight")
    for step in ("step-000000003", "step-000000006"):
        found = tensors_of(out / step)
        assert equal(found, tensors_of(again / step)), step
        assert "model.safetensors/3.weight" in found
        assert "optimizer.safetensors/state.3.bias.exp_avg" in found
        assert "optimizer.safetensors/state.3.weight.exp_avg" not in found


@pytest.mark.parametrize("world", [1, 3] if os.environ.get("SHARDOW_ALL") else [3])
@pytest.mark.parametrize("other", ["plain", "ddp", "fsdp1", "fsdp1-flat", "fsdp2"])
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_another_sharding_on_other_ranks_has_the_same_bits(kind: str, other: str, world: int, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    optimizer = "adamw-one" if other == "fsdp1-flat" else "adamw"  # what is one flat parameter is in one group
    ranks.run(2, straight, kind, optimizer, out, False)
    ranks.run(world, only_resumed, other, optimizer, out, again)
    assert equal(tensors_of(out / "step-000000003"), tensors_of(again / "step-000000003"))


def beside_torchs_own(kind: str, out: Path) -> None:
    run = Run(kind)
    run.train(3)
    run.save(shardow.Checkpoints(out))
    theirs = get_optimizer_state_dict(run.model, run.optimizer, options=StateDictOptions(full_state_dict=True))
    if torch.distributed.get_rank():
        return
    ours = tensors_of(out / "step-000000003")
    named = {
        f"optimizer.safetensors/state.{name}.{key}": value
        for name, state in theirs["state"].items()
        for key, value in state.items()
    }
    assert named.keys() == {name for name in ours if name.startswith("optimizer")}
    assert all(torch.equal(ours[name], value) for name, value in named.items())
    tree = json.loads((out / "step-000000003" / "checkpoint.json").read_text())["optimizer"][""]
    assert [group["params"] for group in tree["groups"]] == [group["params"] for group in theirs["param_groups"]]


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_states_have_the_names_and_values_that_torch_gives_them(kind: str, tmp_path: Path) -> None:
    ranks.run(2, beside_torchs_own, kind, tmp_path)
