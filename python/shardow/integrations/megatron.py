"""Megatron-Core: averages of the float32 masters that its distributed optimizer divides among data-parallel ranks,
where they are.

``ema(model, optimizer)`` is an EMA of the module inside Megatron's wrappers, with the stretches of the optimizer's
range maps as its ``source=``. ``optimizer.step()`` returns whether it was applied: ``if successful: ema.update()``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardow import Schedule
from shardow.averaging.tracked import Source
from shardow.base.checks import invalid, unsupported
from shardow.ema import EMA
from shardow.integrations.common import MastersEMA
from shardow.sharding.slots import by_tensor, slots

_WRAPPERS = ("DistributedDataParallel", "Float16Module")  # Megatron's own, of which the former is not torch's


def ema(
    model: Any, optimizer: Any, decay: float | Schedule | Sequence[float | Schedule] = 0.9999, **options: Any
) -> EMA:
    """Averages of what ``optimizer``, of ``get_megatron_optimizer()``, trains in ``model``: Megatron's
    DistributedDataParallel around it.

    Call ``update()`` after each step that was applied. Files, exports and states are complete models by parameter name,
    for any number of ranks. Collective.

    With ``overlap_param_gather`` a rank's own weights are ahead of others': ``model.start_param_sync(force_sync=True)``
    before swapped().

    Args:
        decay, options: EMA's; neither ``source``, ``optimizer`` nor ``overlap``, and ``group`` is the optimizer's
            data-parallel ranks.

    Raises:
        NotImplementedError: no distributed optimizer; several of them (experts); tensor or pipeline parallelism;
            masters that its precision-aware Adam keeps, or that are offloaded.
    """
    inner = _inner(optimizer)
    module = _module(model)
    options.setdefault("group", inner.data_parallel_group)
    return MastersEMA(module, decay, lambda: masters(module, inner), lambda: _addresses(module), options)


def masters(module: nn.Module, optimizer: Any) -> dict[str, Source]:
    """What ``source=`` takes, of parameters in 16 bits: others have no masters. Those that other ranks have are
    empty."""
    return {name: _stretch(p, optimizer) for name, p in _mastered(module)}


def _mastered(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for slot, *_ in by_tensor(slots(module, "parameter")).values():
        if hasattr(slot.recorded, "main_param"):
            yield slot.name, slot.recorded


def _stretch(parameter: Any, optimizer: Any) -> Source:
    master = parameter.main_param
    if master is None:
        return torch.empty(0, device=parameter.device), 0
    return master.detach(), optimizer._get_model_param_range_map(parameter)["param"].start


def _addresses(module: nn.Module) -> list[int]:
    return [p.main_param.data_ptr() for _, p in _mastered(module) if p.main_param is not None]


def _inner(optimizer: Any) -> Any:
    """The one distributed optimizer."""
    chained = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    found = [one for one in chained if not getattr(one, "is_stub_optimizer", False)]
    if not found or not all(hasattr(one, "model_param_gbuf_map") for one in found):
        raise unsupported("ema() takes an optimizer of OptimizerConfig(use_distributed_optimizer=True)")
    if len(found) > 1:
        raise unsupported(f"{len(found)} distributed optimizers, as of experts or model chunks, are not averaged")
    config = found[0].config
    if getattr(config, "use_precision_aware_optimizer", False) or getattr(config, "optimizer_cpu_offload", False):
        raise unsupported("use_precision_aware_optimizer and optimizer_cpu_offload keep masters out of reach")
    return found[0]


def _module(model: Any) -> nn.Module:
    if isinstance(model, list) and len(model) == 1:
        model = model[0]
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None:
        raise invalid(f"ema() takes Megatron's DistributedDataParallel, or a list of one, not a {type(model).__name__}")
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"):
        if getattr(config, name, 1) > 1:
            raise unsupported(f"{name}={getattr(config, name)}: ranks have other elements or layers of one name")
    inside: nn.Module = model
    while type(inside).__name__ in _WRAPPERS:
        inside = inside.module  # type: ignore[assignment]
    return inside
