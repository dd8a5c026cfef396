"""The candidates: shardow, torch's own ways, and the libraries that people use, each as its users call it."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import shardow
from shardow import _core

if TYPE_CHECKING:
    from benchmarks.updates import Case

Tensors = list[torch.Tensor]
TEACHER = "shardow, a teacher's averages"


@dataclass
class Candidate:
    """``step`` updates the averages once; ``averages()`` are those of the first decay, which show that all candidates
    did the same work.
    """

    name: str
    step: Callable[[], object]
    averages: Callable[[], Tensors]
    note: str = ""


def candidates(case: Case, model: nn.Module) -> Iterator[Candidate]:
    """In the order of the table. Those that keep one average come several times over where several are asked for."""
    yield _shardow("shardow", case, model)
    if case.dtype == torch.float32 and case.num_decays == 1:
        teacher = copy.deepcopy(model).requires_grad_(False)
        yield _shardow(TEACHER, case, model, averages=teacher)
    yield from torch_ways(case, model)
    averaged, (decay, *_) = library("torch.optim.swa_utils"), case.decays
    yield _several("AveragedModel", case, lambda each: averaged_model(averaged, model, each))
    if case.num_decays == 1:
        yield timm_v3(library("timm"), model, decay)
        yield timm_v1(library("timm"), model, decay)
        yield diffusers(library("diffusers.training_utils"), model, decay, foreach=True)
        yield diffusers(library("diffusers.training_utils"), model, decay)
        yield ema_pytorch(library("ema_pytorch"), model, decay)
        yield torch_ema(library("torch_ema"), model, decay)


def limit(case: Case, model: nn.Module) -> Callable[[], None]:
    """The machine's own limit: our loads and stores with one maximum in place of the average, on memory of its own."""
    ema = shardow.EMA(model, list(case.decays), threads=1)
    tracked = ema._averages.tracked
    averages = [[tensor.view(tensor.averages[k]) for tensor in tracked] for k in range(case.num_decays)]
    bound = _core.hooks.Limit([tensor.view(tensor.sources()) for tensor in tracked], averages)

    def step() -> None:
        assert ema is not None  # owns the memory
        bound.update()

    return step


def _shardow(name: str, case: Case, model: nn.Module, **options: Any) -> Candidate:
    ema = shardow.EMA(model, list(case.decays), threads=case.threads, **options)

    def averages() -> Tensors:
        return [tensor.averages[0].view(tensor.local.tensor.shape) for tensor in ema._averages.tracked]

    return Candidate(name, ema.update, averages)


def torch_ways(case: Case, model: nn.Module) -> Iterator[Candidate]:
    parameters = [p.detach() for p in model.parameters()]
    lerped, added, each = (_copies(parameters, case.num_decays) for _ in range(3))

    def foreach_lerp() -> None:
        for averages, decay in zip(lerped, case.decays, strict=True):
            torch._foreach_lerp_(
                averages, parameters if case.dtype == torch.float32 else [p.float() for p in parameters], 1 - decay
            )

    def foreach_mul_add() -> None:
        for averages, decay in zip(added, case.decays, strict=True):
            torch._foreach_mul_(averages, decay)
            torch._foreach_add_(averages, parameters, alpha=1 - decay)

    def mul_add() -> None:
        for averages, decay in zip(each, case.decays, strict=True):
            for average, p in zip(averages, parameters, strict=True):
                average.mul_(decay).add_(p, alpha=1 - decay)

    note = "" if case.dtype == torch.float32 else "with .float() copies"
    yield Candidate("torch foreach lerp", foreach_lerp, lambda: lerped[0], note)
    yield Candidate("torch foreach mul, add", foreach_mul_add, lambda: added[0])
    yield Candidate("mul_().add_() (the sources)", mul_add, lambda: each[0])


def _copies(parameters: Tensors, count: int) -> list[Tensors]:
    return [[p.float().clone() for p in parameters] for _ in range(count)]


def _several(name: str, case: Case, make: Callable[[float], Candidate]) -> Candidate:
    each = [make(decay) for decay in case.decays]

    def step() -> None:
        for candidate in each:
            candidate.step()

    return Candidate(name, step, each[0].averages, each[0].note)


# ---- of a library, or of the compat class that has its names: (library, model, decay)


def averaged_model(lib: Any, model: nn.Module, decay: float) -> Candidate:
    return _averaged(lib, model, lib.get_ema_multi_avg_fn(decay))


def averaged_equally(lib: Any, model: nn.Module, _decay: float) -> Candidate:
    return _averaged(lib, model, None)


def _averaged(lib: Any, model: nn.Module, multi_avg_fn: object) -> Candidate:
    ema = lib.AveragedModel(model, multi_avg_fn=multi_avg_fn)
    ema.update_parameters(model)  # the first one copies
    step = partial(ema.update_parameters, model)
    return Candidate("AveragedModel", step, lambda: list(ema.module.parameters()), _narrow(model))


def _narrow(model: nn.Module) -> str:
    return "" if next(model.parameters()).dtype == torch.float32 else "averages in bf16, which stand still"


def library(name: str) -> Any:
    """Imports a module; of timm its file of averages alone, since the package needs torchvision."""
    if name != "timm":
        return importlib.import_module(name)
    package = importlib.util.find_spec("timm").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("timm_model_ema", Path(package) / "utils" / "model_ema.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def timm_v3(lib: Any, model: nn.Module, decay: float) -> Candidate:
    return _of_module("timm ModelEmaV3", lib.ModelEmaV3(model, decay=decay, foreach=True), model)


def timm_v2(lib: Any, model: nn.Module, decay: float) -> Candidate:
    return _of_module("timm ModelEmaV2", lib.ModelEmaV2(model, decay=decay), model)


def timm_v1(lib: Any, model: nn.Module, decay: float) -> Candidate:
    ema = lib.ModelEma(model, decay=decay)
    return Candidate("timm ModelEma", partial(ema.update, model), lambda: list(ema.ema.parameters()), _narrow(model))


def _of_module(name: str, ema: Any, model: nn.Module) -> Candidate:
    return Candidate(name, partial(ema.update, model), lambda: list(ema.module.parameters()), _narrow(model))


def diffusers(lib: Any, model: nn.Module, decay: float, foreach: bool = False) -> Candidate:
    ema = lib.EMAModel(model.parameters(), decay=decay, min_decay=decay, foreach=foreach)
    ema.optimization_step = 2  # past the first ones, which copy
    name = "diffusers EMAModel" + (", foreach" if foreach else "")
    return Candidate(name, lambda: ema.step(model.parameters()), lambda: ema.shadow_params, _narrow(model))


def ema_pytorch(lib: Any, model: nn.Module, decay: float, foreach: bool = False) -> Candidate:
    often = {"update_after_step": -1, "update_every": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ema = lib.EMA(model, beta=decay, min_value=decay, include_online_model=False, use_foreach=foreach, **often)
    ema.update()  # the first one copies
    return Candidate("ema-pytorch", ema.update, lambda: list(ema.ema_model.parameters()), _narrow(model))


def torch_ema(lib: Any, model: nn.Module, decay: float) -> Candidate:
    parameters = list(model.parameters())
    ema = lib.ExponentialMovingAverage(parameters, decay=decay, use_num_updates=False)
    return Candidate("torch-ema", partial(ema.update, parameters), lambda: ema.shadow_params, _narrow(model))
