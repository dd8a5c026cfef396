"""Surfaces that keep averages on the host of weights on a CUDA device: the same bits, and each weight crosses the link
once an update.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_device import Device, on_device
from torch import nn

Averages = Callable[[], "list[torch.Tensor]"]
Surface = tuple[Callable[[], Any], Averages]  # (update, averages)


def _timm(name: str, **options: Any) -> Callable[[nn.Module], Surface]:
    def make(model: nn.Module) -> Surface:
        from shardow.compat import timm

        ema = getattr(timm, name)(model, 0.5, device="cpu", **options)
        return lambda: ema.update(model), lambda: list((ema.ema if name == "ModelEma" else ema.module).parameters())

    return make


def _swa(model: nn.Module) -> Surface:
    from shardow.compat import swa_utils

    averaged = swa_utils.AveragedModel(model, device="cpu", multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    return lambda: averaged.update_parameters(model), lambda: list(averaged.module.parameters())


def _diffusers(foreach: bool) -> Callable[[nn.Module], Surface]:
    def make(model: nn.Module) -> Surface:
        from shardow.compat import diffusers

        ema = diffusers.EMAModel(model.parameters(), 0.5, min_decay=0.5, foreach=foreach)
        ema.to("cpu")
        return lambda: ema.step(model.parameters()), lambda: ema.shadow_params

    return make


def _torch_ema(model: nn.Module) -> Surface:
    from shardow.compat import torch_ema

    ema = torch_ema.ExponentialMovingAverage(model.parameters(), 0.5, use_num_updates=False)
    ema.to("cpu")
    return ema.update, lambda: ema.shadow_params


def _ema_fsdp(model: nn.Module) -> Surface:
    from shardow.compat import causal_forcing

    ema = causal_forcing.EMA_FSDP(model, 0.5)
    return lambda: ema.update(model), lambda: list(ema.shadow.values())


def _split(model: nn.Module) -> Surface:
    from shardow.compat import timm

    ema = timm.ModelEmaV3(model, 0.5, device="cpu", replicas="split")
    return lambda: ema.update(model), lambda: list(ema.module.state_dict().values())


SURFACES: dict[str, Callable[[nn.Module], Surface]] = {
    "timm.ModelEma": _timm("ModelEma"),
    "timm.ModelEmaV2": _timm("ModelEmaV2"),
    "timm.ModelEmaV3": _timm("ModelEmaV3"),
    "timm.ModelEmaV3, bfloat16": _timm("ModelEmaV3", dtype=torch.bfloat16),
    "timm.ModelEmaV3, a stand-in": _split,
    "swa_utils.AveragedModel": _swa,
    "diffusers.EMAModel": _diffusers(False),
    "diffusers.EMAModel, foreach": _diffusers(True),
    "torch_ema": _torch_ema,
    "causal_forcing.EMA_FSDP": _ema_fsdp,
}


@pytest.mark.parametrize("name", SURFACES)
@on_device
def test_averages_on_the_host_are_whole_after_each_update_and_bit_equal(name: str) -> None:
    with Device(17) as device, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = []
        for _ in range(2):
            torch.manual_seed(3)
            models.append(nn.Sequential(nn.Linear(40, 41), nn.LayerNorm(41), nn.Linear(41, 3)))
        device.hold(models[0])
        surfaces = [SURFACES[name](model) for model in models]
        for number in range(4):
            before = device.fake.copied_to_host()
            for model, (update, _) in zip(models, surfaces, strict=True):
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(0.1 * number).mul_(1.01)
                update()
            crossed = device.fake.copied_to_host() - before
            found, wanted = (averages() for _, averages in surfaces)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), number
            if name != "swa_utils.AveragedModel":  # whose arithmetic is the caller's own, in torch
                assert crossed == sum(p.nbytes for p in models[0].parameters()), number
