"""DistEMA: files, and misuse."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
from dist_emas import Awkward, alone, assert_same, expected, made
from torch import nn

import shardow
from shardow.compat.dist_ema import DistEMA


def _saves(path: str, kind: str) -> None:
    _, ema = made()
    ema.save(path)
    other = models.PARALLEL[kind](sharded.whole("mlp"), dist.get_world_size())
    DistEMA(other, *alone(), decay=0.75).save(f"{path}.{kind}")


def _loads(path: str, kind: str) -> None:
    ema = DistEMA(Awkward(8), *alone(), decay=0.5, warmup=True, power=0.75)
    ema.load(path)
    assert ema.decay_steps == 4
    assert_same(ema.state_dict(everywhere=True), expected())
    with pytest.raises(ValueError, match="saved with warmup=True"):
        DistEMA(Awkward(8), *alone(), decay=0.5).load(path)
    with pytest.raises(ValueError, match="not a saved DistEMA"):
        ema.load(f"{path}.weights")
    with pytest.raises(ValueError, match=r"norm\.bias"):
        DistEMA(nn.Linear(1, 1), *alone(), decay=0.5, warmup=True, power=0.75).load(path)
    mlp = DistEMA(sharded.whole("mlp"), *alone(), decay=0.75)
    whole = mlp.state_dict(everywhere=True)
    for average in mlp.ema_param_list:
        average.zero_()
    mlp.load(f"{path}.{kind}")
    assert_same(mlp.state_dict(everywhere=True), whole)


@pytest.mark.parametrize(("kind", "before", "after"), [("fsdp2", 2, 4), ("hsdp", 4, 2)])
def test_every_rank_writes_its_own_and_any_number_of_ranks_reads_it(
    kind: str, before: int, after: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "ema.safetensors")
    shardow.save({"a": torch.ones(1)}, f"{path}.weights")
    ranks.run(before, _saves, path, kind)
    ranks.run(after, _loads, path, kind)
    assert_same(OrderedDict((name, shardow.open(path)[name]) for name in expected()), expected())


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((1, 0, "fp8"), KeyError, "dtype='fp8'; it must be one of 'fp32'"),
        ((0, 0), ValueError, "world_size=0"),
        ((2, 2), ValueError, "rank=2; with world_size=2"),
        ((1, 0, "fp32", 1.5), ValueError, "decay=1.5"),
        ((1, 0, "fp32", 0.9, True, 0.5, 0.0, 0.0), ValueError, r"inv_gamma=0.0"),
    ],
)
def test_misuse_is_told(arguments: tuple[Any, ...], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        DistEMA(nn.Linear(2, 2), *arguments)


def test_a_decay_outside_of_its_range_is_told() -> None:
    ema = DistEMA(nn.Linear(2, 2), 1, 0)
    with pytest.raises(ValueError, match="decay=2"):
        ema.update(ema.model, 2)
