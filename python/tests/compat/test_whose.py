"""Two surfaces of one class: a call of one that meets the same call of the other is an error on all ranks that names
both, and the next calls are in step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

from shardow.compat import automodel, causal_forcing, dist_ema, timm

Told = tuple[str, str, float]


def plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return models.make()


def fsdp2(seed: int) -> nn.Module:
    return models.build("fsdp2", dist.get_world_size(), seed=seed)


def dist_emas(seed: int) -> Any:
    return dist_ema.DistEMA(plain(seed), dist.get_world_size(), dist.get_rank())


def managers(seed: int) -> Any:
    return automodel.EMAManager(plain(seed))


def managers_of_shards(seed: int) -> Any:
    return automodel.EMAManager(fsdp2(seed))


def managers_of_two_models(seed: int) -> Any:
    return automodel.ShardedModelEMAManager(fsdp2(seed + 10), fsdp2(seed))


def modules(seed: int) -> Any:
    return timm.ModelEmaV3(fsdp2(seed))


def followers(seed: int) -> Any:
    return causal_forcing.EMA_FSDP(fsdp2(seed))


def _save(surface: Any, folder: str) -> Any:
    return surface.save(f"{folder}/saved")


def _whole(surface: Any, folder: str) -> Any:
    return surface.full_state_dict()


def _state(surface: Any, folder: str) -> Any:
    return surface.state_dict()


def _shadow(surface: Any, folder: str) -> Any:
    return surface.export_shadow(folder)


CASES: dict[str, tuple[Callable[[int], Any], Callable[[Any, str], Any], str]] = {
    "DistEMA": (dist_emas, _state, "state_dict() of DistEMA"),
    "EMAManager": (managers, _shadow, "export_shadow() of EMAManager"),
    "EMAManager of shards": (managers_of_shards, _save, "save() of EMA"),
    "ShardedModelEMAManager": (managers_of_two_models, _save, "save() of ShardedModelEMAManager"),
    "ModelEmaV3": (modules, _whole, "full_state_dict() of EMA"),
    "EMA_FSDP": (followers, _whole, "full_state_dict() of EMA"),
}


def crossed(case: str, folder: str) -> list[Told]:
    """Of two surfaces, each rank calls the one that the other does not; then both call the same."""
    make, call, _ = CASES[case]
    surfaces = [make(seed) for seed in (1, 2)]
    found = []
    for turn in (0, 1):
        began, told = time.monotonic(), ("", "")
        try:
            call(surfaces[turn ^ dist.get_rank()], folder)
        except ValueError as error:
            told = (type(error).__name__, str(error))
        found.append((*told, time.monotonic() - began))
    for surface in surfaces:
        call(surface, folder)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_call_that_meets_that_of_another_of_its_class_is_an_error_that_names_both(case: str, tmp_path: Path) -> None:
    whose = CASES[case][2]
    for told in ranks.run(2, crossed, case, str(tmp_path), timeout=60):
        for turn, (kind, message, seconds) in enumerate(told):
            assert kind == "InvalidArgumentError"
            names = [f"{whose} {number}" for number in (1 + turn, 2 - turn)]
            assert f"rank 1 calls {names[1]} where rank 0 calls {names[0]}" in message
            assert seconds < 20
