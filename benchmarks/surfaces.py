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

from benchmarks import origins, peers
from benchmarks.cases import Case, many_small, transformer
from benchmarks.measure import Timing, interleaved
from benchmarks.peers import timm_file

DECAY = 0.999
Step = Callable[[], object]
Results = dict[str, dict[str, Timing]]  # [case][surface]: our speed over the origin's


@dataclass(frozen=True)
class Surface:
    """``origin`` (of a model and a decay) and ``ours`` make a step of a model's averages."""

    name: str
    origin: Callable[[nn.Module, float], Step]
    ours: Callable[[nn.Module], Step]


def surfaces() -> list[Surface]:
    return [
        *_both("timm ModelEma", timm_file, "timm", peers.timm_v1),
        *_both("timm ModelEmaV2", timm_file, "timm", peers.timm_v2),
        *_both("timm ModelEmaV3", timm_file, "timm", peers.timm_v3),
        *_both("AveragedModel, EMA", _module("torch.optim.swa_utils"), "swa_utils", peers.averaged_model),
        *_both("AveragedModel, SWA", _module("torch.optim.swa_utils"), "swa_utils", peers.averaged_equally),
        *_both("torch-ema", _module("torch_ema"), "torch_ema", peers.torch_ema),
        *_both("diffusers EMAModel", _module("diffusers.training_utils"), "diffusers", peers.diffusers),
        *_both("diffusers EMAModel, foreach", _module("diffusers.training_utils"), "diffusers", peers.diffusers, True),
        *_both("ema-pytorch EMA", _module("ema_pytorch"), "ema_pytorch", peers.ema_pytorch),
        *_both("ema-pytorch EMA, foreach", _module("ema_pytorch"), "ema_pytorch", peers.ema_pytorch, True),
        Surface("Causal-Forcing EMA_FSDP", origins.ema_fsdp, _ema_fsdp),
        Surface("DistEMA", origins.dist_ema, _dist_ema),
        Surface("Automodel EMAManager", origins.ema_manager, _ema_manager),
        Surface("Automodel ShardedModelEMAManager", origins.sharded_model_ema, _sharded_model_ema),
        Surface("Bagel fsdp_ema_update", origins.fsdp_ema_update, _bagel),
    ]


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
    return rows + [f"| {name} | {' | '.join(timings[name].cell for timings in results.values())} |" for name in names]


def bars(results: Results) -> list[tuple[str, float, float, bool]]:
    """No surface slower than its origin: the slowest of each case."""
    found = []
    for case, timings in results.items():
        name, slowest = min(timings.items(), key=lambda item: item[1].ratio)
        found.append(
            (f"surfaces, {case}: the slowest ({name}), times its origin", slowest.ratio, 1.0, slowest.ratio >= 1.0)
        )
    return found


def _compared(surface: Surface, case: Case, rounds: int) -> Timing:
    """Both average the same weights at the same time."""
    model = case.model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        timings = interleaved(
            [("origin", surface.origin(model, DECAY)), ("ours", surface.ours(model))], "origin", rounds
        )
    gc.collect()
    return timings["ours"]


def _both(
    name: str, origin: Callable[[], Any], ours: str, make: Callable[..., peers.Candidate], *more: object
) -> list[Surface]:
    """An origin that is installed: the same lines use either."""
    return [
        Surface(
            name,
            lambda model, decay: make(origin(), model, decay, *more).step,
            lambda model: make(_compat(ours), model, DECAY, *more).step,
        )
    ]


def _module(name: str) -> Callable[[], ModuleType]:
    return lambda: importlib.import_module(name)


def _compat(name: str) -> ModuleType:
    return importlib.import_module(f"shardow.compat.{name}")


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
