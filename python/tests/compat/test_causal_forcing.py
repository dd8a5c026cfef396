"""compat.causal_forcing: EMA_FSDP against its own recursion, its files, and what the origin got wrong there."""

from __future__ import annotations

import os
import pickle
from types import SimpleNamespace
from typing import Any

import models
import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
import walks
from causal_forcing_models import assert_same
from torch import nn

from shardow.compat.causal_forcing import EMA_FSDP

DECAYS = (0.999, 0.9, 0.99)  # of the steps to 500, to 510, and after: .decay acts at once


class Dense:
    """The origin's recursion on a whole model."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone().float() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module, d: float) -> None:
        for name, p in model.named_parameters():
            self.shadow[name].mul_(d).add_(p.detach().float(), alpha=1.0 - d)


def decay_at(step: int) -> float:
    return DECAYS[(step > 500) + (step > 510)]


def follow(world: int, kinds: tuple[str, ...], name: str, steps: int) -> None:
    """Every kind of sharding watches one walk; each ends at the dense averages."""
    model = sharded.whole(name)
    shared = [sharded.copied(kind, model, world) for kind in kinds]
    setters = [sharded.setter(one, model) for one in shared]
    emas = [EMA_FSDP(one, DECAYS[0]) for one in shared]
    dense = Dense(model)
    for step in walks.walk(model, name, steps):
        for set_, ema, one in zip(setters, emas, shared, strict=True):
            set_()
            ema.decay = decay_at(step)
            ema.update(one)
        dense.update(model, decay_at(step))
    for kind, ema in zip(kinds, emas, strict=True):
        full = ema.full_state_dict(key_style="clean")
        if dist.get_rank() == 0 or kind == "plain":
            assert_same(full, dense.shadow)
        else:
            assert full == {}


@pytest.mark.parametrize("name", walks.NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_model_s_averages_are_the_origin_s_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    model = sharded.whole(name, dtype)
    ema, held, dense = EMA_FSDP(model, DECAYS[0]), EMA_FSDP(SimpleNamespace(module=model), DECAYS[0]), Dense(model)
    for step in walks.walk(model, name):
        ema.decay = held.decay = decay_at(step)
        ema.update(model)
        held.update(SimpleNamespace(module=model))
        dense.update(model, decay_at(step))
    assert_same(ema.full_state_dict(model), dense.shadow)
    assert_same(dict(held.shadow), dense.shadow)


@pytest.mark.parametrize(
    ("world", "kinds", "steps"),
    [
        (2, ("fsdp1", "fsdp2"), walks.STEPS),
        (4, ("hsdp",), walks.STEPS),
        (4, ("fsdp1-hybrid", "fsdp1-flat", "ddp", "plain"), 40),
    ]
    if not os.environ.get("SHARDOW_ALL")
    else [(world, sharded.kinds(world), walks.STEPS) for world in (2, 4)],
)
@pytest.mark.parametrize("name", walks.NAMES)
def test_shared_models_have_the_dense_averages_bit_for_bit(
    name: str, world: int, kinds: tuple[str, ...], steps: int
) -> None:
    ranks.run(world, follow, world, kinds, name, steps)


def _own_parts() -> None:
    """What `shadow` holds is what the origin's loop over local views makes."""
    model = models.build("fsdp1", 2)
    inner: Any = model.module
    local = {name: p.detach().clone().float() for name, p in inner.named_parameters()}
    ema = EMA_FSDP(model, 0.9)
    for _ in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape))
        ema.update(model)
        for name, p in inner.named_parameters():
            local[name].mul_(0.9).add_(p.detach().float(), alpha=1.0 - 0.9)
    assert_same(
        {name: getattr(piece, "local", piece).reshape(-1) for name, piece in ema.shadow.items()},
        {n: t.reshape(-1) for n, t in local.items()},
    )
    assert any("_fsdp_wrapped_module" in name for name in local)
    with pytest.raises(TypeError, match=r"write shadow\['0"):
        ema.shadow[next(iter(local))] = torch.zeros(1)
    assert type(pickle.loads(pickle.dumps(ema.shadow))) is dict
    first = next(iter(ema.shadow.values()))
    getattr(first, "local", first).zero_()
    first = next(iter(ema.state_dict().values()))
    assert not getattr(first, "local", first).any()


def test_shadow_is_this_rank_s_memory_under_the_origin_s_names() -> None:
    ranks.run(2, _own_parts)
