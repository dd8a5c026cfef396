"""Every class of shardow.compat beside upstream's: one update of the same model, in rounds that take turns.

This file writes out the formula of each project that no package installs, in a few lines of torch on copies of the
weights.
"""

from __future__ import annotations

import copy
import gc
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks import peers
from benchmarks.measure import Bar, Step, Timing, at_least, interleaved
from benchmarks.report import table
from benchmarks.updates import Case, many_small, transformer

DECAY = 0.999
Make = Callable[[nn.Module], Step]  # of a model: an update of its averages
Results = dict[str, dict[str, Timing]]  # by case and class: our speed over upstream's


def run(quick: bool = False, rounds: int = 15) -> Results:
    cases = [
        Case("85 M in 146 tensors", transformer(2, 128) if quick else transformer(), torch.float32),
        Case("2000 small tensors", many_small(200 if quick else 2000), torch.float32),
    ]
    results: Results = {}
    for case in cases:
        torch.set_num_threads(case.threads)
        many = case.rounds(rounds)
        results[case.name] = {name: compared(*makes, case, many) for name, makes in CLASSES.items()}
    return results


def compared(upstream: Make, ours: Make, case: Case, rounds: int) -> Timing:
    """Both average the same weights at the same time."""
    model = case.model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        timings = interleaved({"upstream": upstream(model), "ours": ours(model)}, "upstream", rounds)
    gc.collect()
    return timings["ours"]


def lines(results: Results) -> list[str]:
    names = next(iter(results.values()))
    rows = [[name, *(timings[name].cell for timings in results.values())] for name in names]
    return table(["speed over upstream's", *results], rows)


def bars(results: Results) -> list[Bar]:
    """No compat class slower than its upstream project: the slowest of each case."""
    slowest = {case: min(timings.items(), key=lambda item: item[1].ratio) for case, timings in results.items()}
    return [
        at_least(f"compat classes, {case}: the slowest ({name}), times its upstream project", timing.ratio, 1.0)
        for case, (name, timing) in slowest.items()
    ]


# ---- upstream projects


def ema_fsdp(model: nn.Module) -> Step:
    """Causal-Forcing's EMA_FSDP: float32 on the host, one tensor at a time, by name."""
    shadow = {name: p.detach().clone().float().cpu() for name, p in model.named_parameters()}

    @torch.no_grad()
    def step() -> None:
        for name, p in model.named_parameters():
            shadow[name].mul_(DECAY).add_(p.detach().float().cpu(), alpha=1 - DECAY)

    return step


def dist_ema(model: nn.Module) -> Step:
    """DistEMA on one rank: flat slices, one tensor at a time."""
    slices = [(name, 0, p.numel()) for name, p in model.named_parameters()]
    averages = [p.detach().view(-1).clone().float() for p in model.parameters()]

    @torch.no_grad()
    def step() -> None:
        named = dict(model.named_parameters())
        for (name, begin, end), average in zip(slices, averages, strict=True):
            average.mul_(DECAY).add_(named[name].detach().view(-1)[begin:end], alpha=1 - DECAY)

    return step


def ema_manager(model: nn.Module) -> Step:
    """Automodel's EMAManager: by name, in the weights' dtype."""
    shadow = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def step() -> None:
        for name, p in model.named_parameters():
            if name in shadow:
                shadow[name].mul_(DECAY).add_(p.detach(), alpha=1 - DECAY)

    return step


def sharded_model_ema(model: nn.Module) -> Step:
    """Automodel's ShardedModelEMAManager: pairs of tensors, one after the other."""
    pairs = [(p.detach().clone(), p.detach()) for p in model.parameters()]

    @torch.no_grad()
    def step() -> None:
        for average, p in pairs:
            average.mul_(DECAY).add_(p, alpha=1 - DECAY)

    return step


def fsdp_ema_update(model: nn.Module) -> Step:
    """Bagel's fsdp_ema_update(): two foreach calls."""
    weights = [p.detach() for p in model.parameters()]
    averages = [p.clone() for p in weights]

    @torch.no_grad()
    def step() -> None:
        torch._foreach_mul_(averages, DECAY)
        torch._foreach_add_(averages, weights, alpha=1 - DECAY)

    return step


# ---- each upstream project, and ours


def compat(name: str) -> Any:
    return importlib.import_module(f"shardow.compat.{name}")


def updates(make: Callable[[nn.Module], Any]) -> Make:
    """Of a class whose averages are updated with the model."""

    def updates_of(model: nn.Module) -> Step:
        ema = make(model)
        return lambda: ema.update(model)

    return updates_of


def bagel(model: nn.Module) -> Step:
    averaged, update = copy.deepcopy(model), compat("bagel").fsdp_ema_update
    return lambda: update(averaged, model, DECAY)


def installed(make: Callable[..., peers.Candidate], package: str, ours: str, *more: object) -> tuple[Make, Make]:
    """An upstream project that is installed: the same lines use either."""
    return (
        lambda model: make(peers.library(package), model, DECAY, *more).step,
        lambda model: make(compat(ours), model, DECAY, *more).step,
    )


CLASSES: dict[str, tuple[Make, Make]] = {
    "timm ModelEma": installed(peers.timm_v1, "timm", "timm"),
    "timm ModelEmaV2": installed(peers.timm_v2, "timm", "timm"),
    "timm ModelEmaV3": installed(peers.timm_v3, "timm", "timm"),
    "AveragedModel, EMA": installed(peers.averaged_model, "torch.optim.swa_utils", "swa_utils"),
    "AveragedModel, SWA": installed(peers.averaged_equally, "torch.optim.swa_utils", "swa_utils"),
    "torch-ema": installed(peers.torch_ema, "torch_ema", "torch_ema"),
    "diffusers EMAModel": installed(peers.diffusers, "diffusers.training_utils", "diffusers"),
    "diffusers EMAModel, foreach": installed(peers.diffusers, "diffusers.training_utils", "diffusers", True),
    "ema-pytorch EMA": installed(peers.ema_pytorch, "ema_pytorch", "ema_pytorch"),
    "ema-pytorch EMA, foreach": installed(peers.ema_pytorch, "ema_pytorch", "ema_pytorch", True),
    "Causal-Forcing EMA_FSDP": (ema_fsdp, updates(lambda model: compat("causal_forcing").EMA_FSDP(model, DECAY))),
    "DistEMA": (dist_ema, updates(lambda model: compat("dist_ema").DistEMA(model, 1, 0, decay=DECAY))),
    "Automodel EMAManager": (ema_manager, updates(lambda model: compat("automodel").EMAManager(model, DECAY))),
    "Automodel ShardedModelEMAManager": (
        sharded_model_ema,
        updates(lambda model: compat("automodel").ShardedModelEMAManager(copy.deepcopy(model), model, DECAY)),
    ),
    "Bagel fsdp_ema_update": (fsdp_ema_update, bagel),
}
