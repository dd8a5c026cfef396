"""compat.dist_ema: DistEMA against its own recursion on a whole model, its files, and what the origin got wrong."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ranks
import sharded
import torch
import walks
from dist_emas import Dense, alone, assert_same
from torch import nn

from shardow.compat import dist_ema
from shardow.compat.dist_ema import DistEMA

OPTIONS: dict[str, dict[str, Any]] = {
    "constant": {"decay": 0.999},
    "warm": {"warmup": True, "power": 2 / 3},
    "warm later": {
        "decay": 0.99,
        "warmup": True,
        "power": 0.75,
        "min_decay": 0.25,
        "inv_gamma": 3.0,
        "update_after_step": 40,
    },
    "late without warm-up": {"decay": 0.9, "update_after_step": 40},
}


def follow(name: str, dtype: torch.dtype, options: tuple[str, ...], steps: int) -> None:
    """Every set of options watches one walk of a replicated model."""
    world, rank = alone()
    model = walks.model(name, dtype)  # convolutions are channels_last
    emas = {key: DistEMA(model, world, rank, **OPTIONS[key]) for key in options}
    denses = {key: Dense(model, **OPTIONS[key]) for key in options}
    for step in walks.walk(model, name, steps):
        decay = 0.5 if step == 77 else None
        for key, ema in emas.items():
            assert ema.get_decay() == denses[key].decay()
            ema.update(model, decay)
            denses[key].update(model, decay)
    total = sum(p.numel() for p in model.parameters())
    for key, ema in emas.items():
        assert ema.decay_steps == steps
        assert sum(one.numel() for one in ema.ema_param_list) <= -(-total // world)
        assert [a.numel() for a in ema.ema_param_list] == [last - first + 1 for first, last in ema.index_list]
        found = ema.state_dict(everywhere=True)
        assert_same(found, denses[key].averages)
        given = ema.state_dict(None)
        assert_same(given, found) if rank == 0 else assert_same(given, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", walks.NAMES)
def test_averages_of_one_rank_are_the_origin_s_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    follow(name, dtype, tuple(OPTIONS), walks.STEPS)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", walks.NAMES)
def test_averages_of_many_ranks_are_the_origin_s_bit_for_bit(name: str, world: int) -> None:
    ranks.run(
        world,
        follow,
        name,
        torch.float32,
        tuple(OPTIONS) if os.environ.get("SHARDOW_ALL") else ("constant", "warm later"),
        walks.STEPS,
    )


def follow_shared(world: int, kinds: tuple[str, ...], name: str, steps: int) -> None:
    model = sharded.whole(name)
    shared = [sharded.copied(kind, model, world) for kind in kinds]
    setters = [sharded.setter(one, model) for one in shared]
    emas = [DistEMA(one, *alone(), **OPTIONS["warm"]) for one in shared]
    dense = Dense(model, **OPTIONS["warm"])
    for _ in walks.walk(model, name, steps):
        for set_, ema, one in zip(setters, emas, shared, strict=True):
            set_()
            ema.update(one)
        dense.update(model)
    for kind, one, ema in zip(kinds, shared, emas, strict=True):
        found = ema.state_dict(everywhere=True)
        if kind != "fsdp1-flat":
            assert list(found) == [key for key, _ in one.named_parameters()]
        fresh = DistEMA(model, *alone(), **OPTIONS["warm"])
        fresh.load_state_dict(found)
        assert_same(fresh.state_dict(everywhere=True), dense.averages)


@pytest.mark.parametrize(
    ("world", "kinds", "steps"),
    [(2, ("fsdp2", "ddp"), 200), (4, ("hsdp", "fsdp1", "fsdp1-flat", "ddp"), 40)]
    if not os.environ.get("SHARDOW_ALL")
    else [(world, sharded.kinds(world), walks.STEPS) for world in (2, 4)],
)
@pytest.mark.parametrize("name", walks.NAMES)
def test_sharded_models_have_the_same_averages(name: str, world: int, kinds: tuple[str, ...], steps: int) -> None:
    ranks.run(world, follow_shared, world, kinds, name, steps)


def test_the_partition_is_the_origin_s() -> None:
    """n = ceil(P / N) elements a rank, whatever parameter they belong to; also without torch.distributed."""
    model = walks.model("mlp")
    elements = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    for world in (1, 2, 3, 5, 7):
        each = -(-len(elements) // world)
        for rank in range(world):
            ema = DistEMA(model, world, rank)
            assert torch.equal(
                torch.cat([torch.empty(0), *ema.ema_param_list]), elements[rank * each : (rank + 1) * each]
            )
            named = dict(model.named_parameters())
            for name, (first, last), average in zip(ema.name_list, ema.index_list, ema.ema_param_list, strict=True):
                assert torch.equal(average, named[name].detach().reshape(-1)[first : last + 1])
    with pytest.raises(ValueError, match=r"init_process_group\(\) before"):
        ema.state_dict(None)


def test_options_are_kept_as_attributes_and_in_the_config() -> None:
    model = nn.Linear(2, 2)
    options = {
        "dtype": "bf16",
        "decay": 0.9,
        "warmup": True,
        "power": 0.5,
        "min_decay": 0.1,
        "inv_gamma": 2.0,
        "update_after_step": 3,
    }
    ema = DistEMA(model, 1, 0, "bf16", 0.9, True, 0.5, 0.1, 2.0, 3)
    ema.set_decay_steps(7)
    assert ema.config == {**options, "decay_steps": 7}
    assert all(getattr(ema, key) == value for key, value in options.items())
    assert ema.torch_dtype == dist_ema.PRECISION_TO_TYPE["bf16"] == torch.bfloat16
    assert ema.model is model
    dist_ema.requires_grad(model, False)
    assert not any(p.requires_grad for p in model.parameters())
    dist_ema.requires_grad(model)
    assert all(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        model.weight.fill_(3)
    ema.build_ema_model()
    assert ema.ema_param_list[0].tolist() == [3] * 4


def test_a_model_whose_tensors_are_replaced_is_followed() -> None:
    model = walks.model("mlp")
    ema, dense = DistEMA(model, 1, 0, decay=0.5), Dense(model)
    for watched in (model, walks.model("mlp"), torch.compile(walks.model("mlp"), backend="eager")):
        with torch.no_grad():
            for p in watched.parameters():
                p.data = p.data + 1
        ema.update(watched)
        for name, p in zip(dense.averages, watched.parameters(), strict=True):
            dense.averages[name].mul_(0.5).add_(p.detach(), alpha=0.5)
    assert_same(ema.state_dict(), dense.averages)
