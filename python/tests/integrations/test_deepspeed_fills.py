"""shardow.load() and materialize() of what DeepSpeed trains: weights and masters, each rank its own bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
import torch.distributed as dist
from engines import KINDS, Net, engine, of_deepspeed, train, whole
from torch import nn

import shardow

pytestmark = of_deepspeed
# The others have no masters, or nothing leads to them.
MARKED = [kind for kind in KINDS if kind not in ("zero0", "zero2-fp32")]
SOME = MARKED if os.environ.get("SHARDOW_ALL") else ["zero2", "zero3-bf16"]


def weights_of(made: Any) -> dict[str, torch.Tensor]:
    """Gathered by DeepSpeed."""
    from deepspeed import zero

    found = {}
    for name, p in made.module.named_parameters():
        with zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            found[name] = p.detach().clone()
    return found


def filled(kind: str, path: str) -> list[str]:
    """Of a model that has trained, and holds gathered copies: what is wrong after each of two fillings, and after a
    step that moves nothing."""
    made, wrong = engine(kind), []
    train(made, 0)
    with shardow.open(path) as opened:
        file = {name: opened[name] for name in opened}
    other = {name: one + 1 for name, one in file.items()}

    def expect(what: str, values: dict[str, torch.Tensor]) -> None:
        partitioned = KINDS[kind]["zero_optimization"]["stage"] == 3
        for name, weight in weights_of(made).items():
            wrong.extend([f"{what}: '{name}'"] * (not torch.equal(weight, values[name].to(weight.dtype))))
            if not partitioned:
                values = {**values, name: values[name].to(weight.dtype).float()}
        for name, master in whole(made).items():
            wrong.extend(
                [f"{what}: master of '{name}'"] * (name != "frozen.weight" and not torch.equal(master, values[name]))
            )

    for group in made.optimizer.optimizer.param_groups:
        group["lr"] = 0.0
    for what, fill in {
        "load()": lambda: shardow.load(made.module, path, group=dist.group.WORLD),
        "materialize()": lambda: shardow.materialize(
            made.module, other if dist.get_rank() == 0 else None, group=dist.group.WORLD
        ),
    }.items():
        fill()
        expect(what, file if what == "load()" else other)
        train(made, 1)
        expect(f"a step after {what}", file if what == "load()" else other)
    return wrong


@pytest.mark.parametrize("kind", SOME)
def test_what_fills_weights_fills_the_masters_that_the_next_step_makes_them_from(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    net = Net()
    for p in net.parameters():
        p.data.add_(torch.randn_like(p))
    net.seen.zero_()
    shardow.save(net, tmp_path / "net.safetensors")
    assert engines.run(2, filled, kind, str(tmp_path / "net.safetensors")) == [[], []]


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(700, 700), nn.Linear(7, 7), nn.Linear(7, 7))


def read(path: str) -> int:
    return int(shardow.load(engine("zero3", large()).module, path)["bytes_read"])


def test_a_rank_reads_the_bytes_of_its_partitions(tmp_path: Path) -> None:
    shardow.save(large(), tmp_path / "large.safetensors")
    assert (
        max(engines.run(2, read, str(tmp_path / "large.safetensors")))
        < 0.51 * (tmp_path / "large.safetensors").stat().st_size
    )


def refused(kind: str, path: str) -> tuple[str, bool]:
    """Masters that were put on NVMe; those that DeepSpeed itself takes for others'."""
    stage = KINDS[kind]["zero_optimization"]["stage"]
    made, said = (
        engine(kind, zero_optimization={**KINDS[kind]["zero_optimization"], "round_robin_gradients": stage == 2}),
        "",
    )
    before = weights_of(made)
    made.optimizer.swap_optimizer = stage == 3
    try:
        shardow.load(made.module, path, group=dist.group.WORLD)
    except shardow.Error as error:  # on one rank, or of the other
        said = str(error)
    made.optimizer.swap_optimizer = False
    return said, all(torch.equal(one, before[name]) for name, one in weights_of(made).items())


@pytest.mark.parametrize(
    ("kind", "why"), [("zero3", "'first.weight' has its master on NVMe"), ("zero2", "round_robin_gradients mixes")]
)
def test_masters_that_cannot_be_filled_are_refused_before_anything_has_changed(
    kind: str, why: str, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    net = Net()
    for p in net.parameters():
        p.data.add_(torch.randn_like(p))
    shardow.save(net, tmp_path / "net.safetensors")
    for said, same in engines.run(2, refused, kind, str(tmp_path / "net.safetensors")):
        assert why in said
        assert "load before deepspeed.initialize()" in said
        assert same
