"""Parts of sharded models: their weights are found through the modules that shard them, whatever the last forward left
behind.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import ranks
import torch
from own_averages import averages_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import shardow


def blocks() -> nn.Sequential:
    """The first child is a unit of its own; the root holds the others."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7)), nn.Linear(7, 3, bias=False))


def fsdp1(model: nn.Sequential, use_orig_params: bool, strategy: ShardingStrategy) -> tuple[nn.Module, nn.Sequential]:
    options: dict[str, Any] = {
        "device_id": torch.device("cpu"),
        "use_orig_params": use_orig_params,
        "sharding_strategy": strategy,
    }
    model[0] = FullyShardedDataParallel(model[0], **options)
    whole = FullyShardedDataParallel(model, **options)
    return whole, whole.module


def fsdp2(model: nn.Sequential, **options: Any) -> tuple[nn.Module, nn.Sequential]:
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model, model


def values(full: nn.Module, scale: float) -> dict[str, torch.Tensor]:
    return {name: p.detach() * scale for name, p in full.named_parameters()}


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rank: int, what: str) -> None:
    assert set(found) == (set(expected) if rank == 0 else set()), what
    for name, value in found.items():
        assert torch.equal(value, expected[name]), (what, name)


def averages_of_parts(whole: nn.Module, inner: nn.Sequential, directory: str, what: str) -> None:
    """The average, the swap and the file of each part are those of the same part of a plain model."""
    rank, x = torch.distributed.get_rank(), torch.ones(2, 5)
    for i in range(3):
        twin = blocks()[i]
        ema = shardow.EMA(inner[i], decay=0.5)
        check(ema.full_state_dict(), values(twin, 1.0), rank, what)
        with torch.no_grad():
            before = whole(x)
            averages_of(ema).view.reshard()
            for one in averages_of(ema).view.parameters:
                one.tensor.mul_(3.0)
        ema.update()
        check(ema.full_state_dict(), values(twin, 2.0), rank, f"{what}, {i}")
        with torch.no_grad():
            after = whole(x)
            with ema.swapped():
                whole(x)
            assert torch.equal(whole(x), after), f"{what}, {i}: the weights are not back"
            assert i != 0 or not torch.equal(before, after), f"{what}, {i}: the forward did not see the written shards"
        shardow.save(inner[i], f"{directory}/{i}")
        check(
            dict(shardow.open(f"{directory}/{i}").items()) if rank == 0 else {},
            values(twin, 3.0),
            rank,
            f"{what}, {i} in a file",
        )
        averages_of(ema).view.reshard()
        with torch.no_grad():
            for one in averages_of(ema).view.parameters:
                one.tensor.div_(3.0)


def fsdp1_parts(directory: str) -> None:
    for use_orig_params, strategy, warm in (
        (True, ShardingStrategy.FULL_SHARD, True),
        (False, ShardingStrategy.FULL_SHARD, False),
        (False, ShardingStrategy.SHARD_GRAD_OP, True),
    ):
        whole, inner = fsdp1(blocks(), use_orig_params, strategy)
        if warm:
            with torch.no_grad():
                whole(torch.ones(2, 5))
        averages_of_parts(whole, inner, directory, f"{use_orig_params} {strategy} {warm}")


def fsdp2_parts(directory: str) -> None:
    for reshard_after_forward, spoil in ((None, "no_grad"), (None, "raised"), (False, "no_grad")):
        whole, inner = fsdp2(blocks(), reshard_after_forward=reshard_after_forward)
        if spoil == "no_grad":
            with torch.no_grad():
                whole(torch.ones(2, 5))
        else:
            with contextlib.suppress(RuntimeError):
                whole(torch.ones(2, 6))
        averages_of_parts(whole, inner, directory, f"{reshard_after_forward} {spoil}")


def test_parts_of_fsdp2_models_are_found_through_their_parents(tmp_path: Any) -> None:
    ranks.run(2, fsdp2_parts, str(tmp_path))


def test_parts_of_fsdp1_models_are_found_through_their_parents(tmp_path: Any) -> None:
    ranks.run(2, fsdp1_parts, str(tmp_path))


def orphans() -> None:
    whole, inner = fsdp1(blocks(), True, ShardingStrategy.FULL_SHARD)
    part = inner[1]
    del whole, inner
    gc.collect()
    with pytest.raises(NotImplementedError, match=r"part of an FSDP1 model that is gone"):
        shardow.EMA(part)


def test_a_part_whose_fsdp1_model_is_gone_is_refused() -> None:
    ranks.run(2, orphans)
