"""Averages that become the weights, for training to go on from: on every rank, at every dtype, more than once."""

from __future__ import annotations

from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from own_averages import averages_of
from small import clone, equal, make_model, train

import shardow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_weights_are_the_averages_each_time_and_the_averages_stay(dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    ema = shardow.EMA(model, decay=[0.9, 0.5])
    for decay in (0.9, 0.5, 0.9):
        train(model, 3, ema.update)
        kept, step = ema.full_state_dict(decay, complete=False), ema.step
        ema.feed_back(decay)
        assert equal(clone(model), {name: one.to(dtype) for name, one in kept.items()})
        assert equal(ema.full_state_dict(decay, complete=False), kept)
        assert ema.step == step
    assert not equal(clone(model), clone(make_model(dtype=dtype)))


def test_master_copies_get_them_too_and_autograd_is_told() -> None:
    model = make_model(dtype=torch.bfloat16)
    masters = {name: p.detach().float() for name, p in model.named_parameters()}
    ema = shardow.EMA(model, decay=0.5, source=masters)
    for one in masters.values():
        one.add_(0.3)
    ema.update()
    loss = model(torch.ones(9, 7, dtype=torch.bfloat16)).square().mean()
    ema.feed_back()
    assert equal(masters, ema.full_state_dict(complete=False))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_it_is_refused_inside_swapped() -> None:
    model = make_model()
    ema = shardow.EMA(model)
    before = clone(model)
    with pytest.raises(ValueError, match="say which with decay="):
        shardow.EMA(make_model(), decay=[0.9, 0.5]).feed_back()
    with ema.swapped(), pytest.raises(ValueError, match=r"feed_back\(\) inside swapped\(\)"):
        ema.feed_back()
    assert equal(clone(model), before)


def fed_back(kind: str) -> tuple[list[bool], str]:
    model = models.build(kind, dist.get_world_size())
    ema = shardow.EMA(model, decay=0.5, timeout=20)
    good = []
    for step in (1, 2):
        for at, one in enumerate(averages_of(ema).view.parameters):
            one.tensor.add_(0.5 * step + at)
        ema.update()
        wanted = ema.full_state_dict(complete=False)
        ema.feed_back()
        found = shardow.full_state_dict(model)
        good.append(all(torch.equal(found[name], one) for name, one in wanted.items()))
    try:
        masters = {one.name: one.tensor.clone() for one in averages_of(ema).view.parameters}
        shardow.EMA(model, decay=0.5, source=masters, timeout=20).feed_back()
    except NotImplementedError as error:
        return good, str(error)
    return good, "taken"


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp1", 2), ("fsdp2", 2), ("hsdp", 4)])
def test_every_rank_goes_on_with_the_same_weights(kind: str, world: int) -> None:
    for good, said in ranks.run(world, fed_back, kind):
        assert good == [True, True]
        assert ("whole master copies" in said or "master copy on every replica" in said) == (kind in ("ddp", "hsdp")), (
            said
        )


def differing() -> Any:
    model = models.build("ddp", 2)
    ema = shardow.EMA(model, decay=0.5, timeout=20)
    with torch.no_grad():
        next(model.parameters()).add_(float(dist.get_rank()))
    before = clone(model)
    with pytest.raises(ValueError, match="has other values on rank"):
        ema.feed_back()
    return equal(clone(model), before)


def test_replicas_that_differ_are_not_overwritten() -> None:
    assert ranks.run(2, differing) == [True, True]
