"""Every surface of shardow.compat beside its origin: one update of the same model, in rounds that take turns."""

from __future__ import annotations

import copy
import gc
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from benchmarks import origins
from benchmarks.cases import Case, many_small, transformer
from benchmarks.measure import Timing, interleaved
from benchmarks.peers import timm_file

DECAY = 0.999
Step = Callable[[], object]
Results = dict[str, dict[str, Timing]]  # [case][surface]: our speed over the origin's


@dataclass(frozen=True)
class Surface:
    """``origin`` and ``ours`` make a step of a model's averages."""

    name: str
    origin: Callable[[nn.Module], Step]
    ours: Callable[[nn.Module], Step]


def surfaces() -> list[Surface]:
    return [
        *_both("timm ModelEma", timm_file, "timm", lambda lib, model: _updating(lib.ModelEma(model, DECAY), model)),
        *_both("timm ModelEmaV2", timm_file, "timm", lambda lib, model: _updating(lib.ModelEmaV2(model, DECAY), model)),
        *_both("timm ModelEmaV3", timm_file, "timm", lambda lib, model: _updating(lib.ModelEmaV3(model, DECAY), model)),
        *_both("AveragedModel, "
               "EMA", _swa_utils, "swa_utils", lambda lib,
               model: _averaged(lib, model, lib.get_ema_multi_avg_fn(DECAY))),
        *_both("AveragedModel, SWA", _swa_utils, "swa_utils", lambda lib, model: _averaged(lib, model, None)),
        *_both("torch-ema", _torch_ema, "torch_ema", _torch_ema_step),
        *_both("diffusers EMAModel", _diffusers, "diffusers", lambda lib, model: _diffusers_step(lib, model, False)),
        *_both("diffusers EMAModel, "
               "foreach", _diffusers, "diffusers", lambda lib, model: _diffusers_step(lib, model, True)),
        *_both("ema-pytorch EMA", _ema_pytorch, "ema_pytorch", lambda lib, model: _ema_pytorch_step(lib, model, False)),
        *_both("ema-pytorch EMA, "
               "foreach", _ema_pytorch, "ema_pytorch", lambda lib, model: _ema_pytorch_step(lib, model, True)),
        Surface("Causal-Forcing EMA_FSDP", lambda model: origins.ema_fsdp(model, DECAY), _ema_fsdp),
        Surface("DistEMA", lambda model: origins.dist_ema(model, DECAY), _dist_ema),
        Surface("Automodel EMAManager", lambda model: origins.ema_manager(model, DECAY), _ema_manager),
        Surface("Automodel ShardedModelEMAManager", lambda model: origins.sharded_model_ema(model, DECAY),
         _sharded_model_ema),
        Surface("Bagel fsdp_ema_update", lambda model: origins.fsdp_ema_update(model, DECAY), _bagel),
    ]  # fmt: skip


def run(quick: bool, rounds: int) -> Results:
    cases = [
        Case("85 M in 146 tensors", transformer(2, 128) if quick else transformer(), torch.float32),
        Case("2000 small tensors", many_small(200 if quick else 2000), torch.float32),
    ]
    results: Results = {}
    for case in cases:
        torch.set_num_threads(case.threads)
        many = rounds * (10 if case.elements < 10_000_000 else 1)
        results[case.name] = {surface.name: _compared(surface, case, many) for surface in surfaces()}
    return results


def lines(results: Results) -> list[str]:
    names = next(iter(results.values()))
    rows = [f"| speed over the origin's | {' | '.join(results)} |", f"|---|{'---|' * len(results)}"]
    return rows + [f"| {name} | {' | '.join(_cell(timings[name]) for timings in results.values())} |" for name in names]


def bars(results: Results) -> list[tuple[str, float, float, bool]]:
    """No surface slower than its origin: the slowest of each case."""
    found = []
    for case, timings in results.items():
        name, slowest = min(timings.items(), key=lambda item: item[1].ratio)
        found.append(
            (f"surfaces, {case}: the slowest ({name}), times its origin", slowest.ratio, 1.0, slowest.ratio >= 1.0)
        )
    return found


def _cell(timing: Timing) -> str:
    low, high = timing.spread
    return f"{timing.ratio:.2f} ({low:.2f} to {high:.2f}), {timing.median * 1e3:.2f} ms"


def _compared(surface: Surface, case: Case, rounds: int) -> Timing:
    """Both average the same weights at the same time."""
    model = case.model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        timings = interleaved([("origin", surface.origin(model)), ("ours", surface.ours(model))], "origin", rounds)
    gc.collect()
    return timings["ours"]


def _both(
    name: str, origin: Callable[[], ModuleType], ours: str, step: Callable[[ModuleType, nn.Module], Step]
) -> list[Surface]:
    """An origin that is installed: the same lines use either."""
    return [Surface(name, lambda model: step(origin(), model), lambda model: step(_compat(ours), model))]


def _compat(name: str) -> ModuleType:
    return importlib.import_module(f"shardow.compat.{name}")


def _swa_utils() -> ModuleType:
    from torch.optim import swa_utils

    return swa_utils


def _torch_ema() -> ModuleType:
    import torch_ema

    return torch_ema


def _diffusers() -> ModuleType:
    from diffusers import training_utils

    return training_utils


def _ema_pytorch() -> ModuleType:
    import ema_pytorch

    return ema_pytorch


def _updating(ema: Any, model: nn.Module) -> Step:
    return lambda: ema.update(model)


def _averaged(lib: ModuleType, model: nn.Module, multi_avg_fn: object) -> Step:
    ema = lib.AveragedModel(model, multi_avg_fn=multi_avg_fn)
    ema.update_parameters(model)  # the first one copies
    return lambda: ema.update_parameters(model)


def _torch_ema_step(lib: ModuleType, model: nn.Module) -> Step:
    parameters = list(model.parameters())
    ema = lib.ExponentialMovingAverage(parameters, decay=DECAY, use_num_updates=False)
    return lambda: ema.update(parameters)


def _diffusers_step(lib: ModuleType, model: nn.Module, foreach: bool) -> Step:
    ema = lib.EMAModel(model.parameters(), decay=DECAY, min_decay=DECAY, foreach=foreach)
    ema.optimization_step = 2  # past the first ones, which copy
    return lambda: ema.step(model.parameters())


def _ema_pytorch_step(lib: ModuleType, model: nn.Module, foreach: bool) -> Step:
    ema = lib.EMA(
        model,
        beta=DECAY,
        min_value=DECAY,
        update_after_step=-1,
        update_every=1,
        include_online_model=False,
        use_foreach=foreach,
    )
    ema.update()  # the first one copies
    step: Step = ema.update
    return step


def _ema_fsdp(model: nn.Module) -> Step:
    ema = _compat("causal_forcing").EMA_FSDP(model, DECAY)
    return lambda: ema.update(model)


def _dist_ema(model: nn.Module) -> Step:
    ema = _compat("dist_ema").DistEMA(model, 1, 0, decay=DECAY)
    return lambda: ema.update(model)


def _ema_manager(model: nn.Module) -> Step:
    ema = _compat("automodel").EMAManager(model, DECAY)
    return lambda: ema.update(model)


def _sharded_model_ema(model: nn.Module) -> Step:
    ema = _compat("automodel").ShardedModelEMAManager(copy.deepcopy(model), model, DECAY)
    return lambda: ema.update(model)


def _bagel(model: nn.Module) -> Step:
    averaged, lib = copy.deepcopy(model), _compat("bagel")
    return lambda: lib.fsdp_ema_update(averaged, model, DECAY)


__all__ = ["bars", "lines", "run"]
