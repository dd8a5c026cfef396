"""A rank that skips an update (`if rank == 0: ema.update(model)`): averages that are shared out would be of two ages.
Every call that brings them together refuses, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist

from shardow import EMA
from shardow.compat.automodel import EMAManager
from shardow.compat.causal_forcing import EMA_FSDP
from shardow.compat.dist_ema import DistEMA
from shardow.compat.ema_pytorch import EMA as EmaPytorch
from shardow.compat.swa_utils import AveragedModel
from shardow.compat.timm import ModelEmaV2


def _surfaces(model: torch.nn.Module, folder: Path) -> list[tuple[Callable[[], object], list[Callable[[], object]]]]:
    """(update, what needs the averages of all ranks) of each."""
    ema, timm, swa = EMA(model), ModelEmaV2(model, replicas="split"), AveragedModel(model, replicas="split")
    pytorch, causal, manager = (
        EmaPytorch(model, replicas="split", include_online_model=False, update_every=1),
        EMA_FSDP(model),
        EMAManager(model, replicas="split"),
    )
    divided = DistEMA(model, dist.get_world_size(), dist.get_rank())
    return [
        (
            ema.update,
            [
                ema.full_state_dict,
                ema.swapped().__enter__,
                ema.distance,
                lambda: ema.copy_to(model),
                lambda: ema.save(folder / "a.safetensors"),
                lambda: ema.export(folder / "b.safetensors"),
                lambda: ema.async_save(folder / "c.safetensors"),
            ],
        ),
        (lambda: timm.update(model), [timm.full_state_dict]),
        (lambda: swa.update_parameters(model), [swa.full_state_dict]),
        (pytorch.update, [pytorch.copy_params_from_ema_to_model]),
        (lambda: causal.update(model), [causal.full_state_dict, lambda: causal.copy_to(model)]),
        (
            lambda: manager.update(model),
            [
                lambda: manager.save(folder / "manager"),
                lambda: manager.export_shadow(folder),
                lambda: manager.export_safetensors(folder),
                manager.swapped().__enter__,
            ],
        ),
        (lambda: divided.update(model), [divided.state_dict, lambda: divided.save(folder / "d.safetensors")]),
    ]


def _skips_one(kind: str, folder: str) -> list[str]:
    model: Any = models.PARALLEL[kind](models.plain_twin(kind), dist.get_world_size())
    refused = []
    for update, uses in _surfaces(model, Path(folder)):
        update()
        if dist.get_rank() == 0:
            update()
        for use in uses:
            with pytest.raises(ValueError, match="every rank") as caught:
                use()
            refused.append(str(caught.value))
    return refused


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_averages_of_two_ages_are_refused_on_every_rank(kind: str, tmp_path: Path) -> None:
    for refused in ranks.run(2, _skips_one, kind, str(tmp_path)):
        assert all("updates of the averages is 2 on rank 0 and 1 on rank 1" in text for text in refused)
    assert not list(tmp_path.iterdir())


def _loads_again(folder: str) -> float:
    model = models.PARALLEL["ddp"](models.plain_twin("ddp"), dist.get_world_size())
    ema = EMA(model)
    ema.update()
    ema.save(Path(folder) / "good.safetensors")
    if dist.get_rank() == 0:
        ema.update()
    with pytest.raises(ValueError, match="every rank"):
        ema.full_state_dict()
    ema.load(Path(folder) / "good.safetensors")
    ema.full_state_dict()
    return ema.stats()["updates"]


def test_a_loaded_state_makes_ranks_agree_again(tmp_path: Path) -> None:
    assert ranks.run(2, _loads_again, str(tmp_path)) == [1, 1]
