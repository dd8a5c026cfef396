"""Surfaces whose origins are plain objects copy and pickle as those do; of models that ranks share, a sentence says why
not.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import models
import pytest
import ranks
import torch
from torch import nn

from shardow.compat.automodel import EMAManager, ShardedModelEMAManager
from shardow.compat.causal_forcing import EMA_FSDP
from shardow.compat.dist_ema import DistEMA
from shardow.compat.timm import ModelEma

MADE: dict[str, Callable[[nn.Module], Any]] = {
    "EMAManager": lambda model: EMAManager(model, 0.5),
    "ShardedModelEMAManager": lambda model: ShardedModelEMAManager(models.make(), model, 0.5),
    "EMA_FSDP": lambda model: EMA_FSDP(model, 0.5),
    "DistEMA": lambda model: DistEMA(model, 1, 0, decay=0.5, warmup=True, power=0.75),
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda ema: pickle.loads(pickle.dumps(ema)),
}


@torch.no_grad()
def wander(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.add_(torch.randn(p.shape, generator=generator))


def averages(ema: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in ema.state_dict().items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MADE)
def test_a_copy_has_averages_of_its_own_and_goes_on_with_the_model_it_is_given(kind: str, way: str) -> None:
    model = models.make()
    ema = MADE[kind](model)
    for seed in range(3):
        wander(model, seed)
        ema.update(model)
    before = averages(ema)
    copied = WAYS[way](ema)
    torch.testing.assert_close(averages(copied), before, rtol=0, atol=0)
    for seed in range(3, 5):
        wander(model, seed)
        copied.update(model)
        torch.testing.assert_close(averages(ema), before, rtol=0, atol=0)
    ema.update(model)
    assert all(
        not torch.equal(tensor, before[name])
        for name, tensor in averages(copied).items()
        if tensor.is_floating_point() and "running" not in name
    )
    copied_again = WAYS[way](ema)
    ema.update(model)
    copied_again.update(model)
    torch.testing.assert_close(averages(copied_again), averages(ema), rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_stand_in_averages_into_its_own_memory(way: str) -> None:
    model = models.make()
    ema = ModelEma(model, 0.5, replicas="split")
    copied = WAYS[way](ema)
    before = averages(ema.ema)
    own = copied.ema._model
    wander(own, 1)
    copied.update(own)
    torch.testing.assert_close(averages(ema.ema), before, rtol=0, atol=0)
    for name, p in own.named_parameters():
        torch.testing.assert_close(copied.ema.state_dict()[name], 0.5 * before[name] + 0.5 * p.detach())


def refused() -> None:
    model = models.build("fsdp2", 2)
    rank = torch.distributed.get_rank()
    for ema in (
        EMAManager(model),
        ShardedModelEMAManager(models.build("fsdp2", 2), model),
        EMA_FSDP(model),
        DistEMA(model, 2, rank),
    ):
        for way in WAYS.values():
            with pytest.raises(NotImplementedError, match=r"ranks (share )?can't be copied.*save"):
                way(ema)


def test_averages_that_ranks_share_say_why_they_are_not_copied() -> None:
    ranks.run(2, refused)


@pytest.mark.parametrize("kind", ["EMAManager", "EMA_FSDP"])
def test_weights_in_channels_last_are_averaged_and_keep_their_strides(kind: str) -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    ema, before = MADE[kind](model), model.weight.detach().clone()
    wander(model, 1)
    ema.update(model)
    expected, strides = 0.5 * before + 0.5 * model.weight.detach(), model.weight.stride()
    torch.testing.assert_close(averages(ema)["weight"], expected)
    with ema.swapped():
        torch.testing.assert_close(model.weight.detach(), expected)
        assert model.weight.stride() == strides
