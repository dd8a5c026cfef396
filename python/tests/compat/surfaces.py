"""Every surface by its name: what updates it, and its averages by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import shardow
from shardow.compat import (
    automodel,
    bagel,
    causal_forcing,
    diffusers,
    dist_ema,
    ema_pytorch,
    swa_utils,
    timm,
    torch_ema,
)

Averages = Callable[[], dict[str, torch.Tensor]]
Surface = tuple[Callable[[], object], Averages]  # (update, averages by name)
Make = Callable[[nn.Module, Callable[[], nn.Module]], Surface]  # of a model, and what makes it again


def made() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.LayerNorm(5))


def _of(module: Callable[[], nn.Module]) -> Averages:
    return lambda: dict(module().named_parameters())


def _in_order(model: nn.Module, found: Callable[[], list[torch.Tensor]]) -> Averages:
    names = [name for name, _ in model.named_parameters()]
    return lambda: dict(zip(names, found(), strict=True))


def _core(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
    ema = shardow.EMA(model, 0.5)
    return ema.update, lambda: dict(ema.state_dict()["averages"])


def _manager(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
    ema = automodel.EMAManager(model, 0.5)
    return lambda: ema.update(model), ema.state_dict


def _second_model(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
    ema = automodel.ShardedModelEMAManager(again(), model, 0.5)
    return lambda: ema.update(model), lambda: {name: tensor.clone() for name, tensor in ema.state_dict().items()}


def _bagel(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
    second = again()
    bagel.fsdp_ema_update(second, model, 0.0)
    return lambda: bagel.fsdp_ema_update(second, model, 0.5), _of(lambda: second)


def _ema_fsdp(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
    ema = causal_forcing.EMA_FSDP(model, 0.5)
    return lambda: ema.update(model), lambda: dict(ema.shadow)


def _dist_ema(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    ema = dist_ema.DistEMA(model, world, rank, decay=0.5)
    return lambda: ema.update(model), lambda: dict(zip(ema.name_list, ema.ema_param_list, strict=True))


def _torch_ema(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
    ema = torch_ema.ExponentialMovingAverage(model.parameters(), 0.5, use_num_updates=False)
    return ema.update, _in_order(model, lambda: ema.shadow_params)


def _torch_ema_given(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
    ema = torch_ema.ExponentialMovingAverage(model.parameters(), 0.5, use_num_updates=False)
    return lambda: ema.update(model.parameters()), _in_order(model, lambda: ema.shadow_params)


def _diffusers(foreach: bool) -> Make:
    def make(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
        ema = diffusers.EMAModel(model.parameters(), 0.5, min_decay=0.5, foreach=foreach)
        return lambda: ema.step(model.parameters()), _in_order(model, lambda: ema.shadow_params)

    return make


def _ema_pytorch(replicas: str) -> Make:
    def make(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
        ema = ema_pytorch.EMA(model, beta=0.5, min_value=0.5, update_after_step=0, update_every=1, replicas=replicas)
        return ema.update, _of(lambda: ema.ema_model)

    return make


def _timm(cls: type, replicas: str) -> Make:
    def make(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
        ema = cls(model, decay=0.5, replicas=replicas)
        return lambda: ema.update(model), _of(lambda: ema.module)

    return make


def _swa(replicas: str, ours: bool) -> Make:
    def make(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
        function = swa_utils.get_ema_avg_fn(0.5) if ours else lambda e, p, _: 0.5 * e + 0.5 * p
        averaged = swa_utils.AveragedModel(model, avg_fn=function, replicas=replicas)
        return lambda: averaged.update_parameters(model), _of(lambda: averaged.module)

    return make


SURFACES: dict[str, Make] = {
    "shardow.EMA": _core,
    "EMAManager": _manager,
    "ShardedModelEMAManager": _second_model,
    "fsdp_ema_update": _bagel,
    "EMA_FSDP": _ema_fsdp,
    "DistEMA": _dist_ema,
    "torch_ema": _torch_ema,
    "torch_ema, parameters given": _torch_ema_given,
    "diffusers": _diffusers(False),
    "diffusers foreach": _diffusers(True),
    "ema_pytorch": _ema_pytorch("copy"),
    "ema_pytorch split": _ema_pytorch("split"),
    "ModelEma": _timm(timm.ModelEma, "copy"),
    "ModelEma split": _timm(timm.ModelEma, "split"),
    "ModelEmaV2": _timm(timm.ModelEmaV2, "copy"),
    "ModelEmaV3": _timm(timm.ModelEmaV3, "copy"),
    "AveragedModel": _swa("copy", True),
    "AveragedModel split": _swa("split", True),
    "AveragedModel, own function": _swa("copy", False),
    "AveragedModel split, own function": _swa("split", False),
}
