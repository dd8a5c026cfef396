"""One training with EMAs of every rule, dtype and decay beside each other. How averages are kept must not show in any
bit of them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from pathlib import Path
from typing import Any, get_args

import models
import torch
import torch.distributed as dist
from fake_device import Device
from small import equal
from torch import nn

import shardow
from shardow.averaging.options import Rule

DECAYS: dict[str, Any] = {"one decay": 0.9, "four decays": [0.9, 0.5, 0.999, 0.99999]}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of the weights
CASES = [("plain", 1), ("ddp", 2), ("fsdp1", 2), ("fsdp1-flat", 2), ("fsdp2", 2), ("hsdp", 4), ("tp+fsdp2", 4)]
OF_ALL = [(kind, world, dtype) for kind, world in CASES for dtype in DTYPES]
ALL = bool(os.environ.get("SHARDOW_ALL"))
SOME = OF_ALL if ALL else [(*case, DTYPES[i % 4]) for i, case in enumerate(CASES)]
# Without SHARDOW_ALL a sharding of one or two ranks is tried with one of these two ways to keep averages.
OVERLAPPED, OFFLOADED = (SOME, SOME) if ALL else (SOME[:5:2], SOME[1:5:2])

#: How averages are kept: what EMA is given for it. Offloaded ones by hand are not attached to the optimizer.
HOW: dict[str, dict[str, Any]] = {
    "resident": {},
    "overlapped": {"overlap": True},
    "offloaded": {"device": "cpu"},
    "offloaded, overlap=True": {"device": "cpu", "overlap": True},
    "offloaded by hand": {"device": "cpu"},
}

SMALLEST_RING = 4096  # bytes
IN_BETWEEN = ("lerp, four decays", "noise", "bfloat16")  # are swapped, saved, loaded and reset between steps

Found = tuple[dict[str, torch.Tensor], dict[str, dict[str, float]]]


def options() -> dict[str, dict[str, Any]]:
    rules = {
        f"{rule}, {name}": {"rule": rule, "decay": decay} for rule in get_args(Rule) for name, decay in DECAYS.items()
    }
    return rules | {
        "schedule": {"decay": shardow.schedules.inverse_gamma()},
        "noise": {"decay": [0.9, 0.7], "stochastic": True, "seed": 7},
        "noise, more threads": {"decay": 0.9, "stochastic": True, "threads": 3},
        "float64": {"decay": [0.9, 0.7], "dtype": torch.float64},
        "bfloat16": {"decay": [0.9, 0.7], "dtype": torch.bfloat16, "stochastic": True},
        "float16": {"decay": 0.9, "dtype": torch.float16, "stochastic": True},
        "every third step": {"decay": 0.9, "update_every": 3, "start_step": 2},
        "copied replicas": {"decay": 0.9, "replicas": "copy"},
        "propagated": {"decay": 0.9, "nonfinite": "propagate"},
        "some weights": {"decay": 0.9, "params": lambda name, _: name.endswith("weight")},
    }


def build(kind: str, world: int, dtype: torch.dtype) -> nn.Module:
    """On every rank more than the smallest ring holds, in parts of awkward sizes."""
    torch.manual_seed(5)
    if kind == "tp+fsdp2":
        model = nn.Sequential(nn.Linear(128, 72), nn.ReLU(), nn.Linear(72, 4), nn.ReLU(), nn.Linear(4, 4))
    else:
        model = nn.Sequential(
            nn.Linear(131, 67),
            nn.LayerNorm(67),
            nn.ReLU(),
            nn.Linear(67, 5),
            nn.ReLU(),
            nn.Linear(5, 1),
            nn.Linear(1, 4),
        )
    return models.PARALLEL[kind](model.to(dtype), world)


def give_gradients(model: nn.Module, step: int) -> None:
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 0.1 * step - 0.05 * i)
        if step == 8 and i == 0:
            getattr(p.grad, "_local_tensor", p.grad).view(-1)[:1] = float("nan")


def everything(
    kind: str, dtype: torch.dtype, how: str, folder: str, seed: int | None = None, ring_bytes: int = SMALLEST_RING
) -> Found:
    """On every rank: (averages by "options/decay/name", on rank 0; stats() by options) after steps, a step with NaN,
    swaps, saves, loads and moved memory. ``seed``: of the device."""
    world = dist.get_world_size()
    model = build(kind, world, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offloaded = how.startswith("offloaded")
    with warnings.catch_warnings(), Device(seed) if offloaded else contextlib.nullcontext() as device:
        warnings.simplefilter("ignore")
        if device is not None:
            device.hold(model)
        attached = None if how in ("resident", "offloaded by hand") else optimizer
        ring = {"ring_bytes": ring_bytes} if offloaded else {}
        emas = {
            name: shardow.EMA(model, **chosen, **HOW[how], **ring, optimizer=attached)
            for name, chosen in options().items()
        }
        for step in range(1, 10):
            give_gradients(model, step)
            optimizer.step()
            for ema in emas.values() if attached is None else ():
                ema.update()
            _in_between(step, kind, model, emas, Path(folder, how))
        found = {
            f"{name}/{decay}/{tensor}": value
            for name, ema in emas.items()
            for decay in ema.decays
            for tensor, value in ema.full_state_dict(decay, complete=False).items()
        }
        stats = {name: ema.stats() for name, ema in emas.items()}
        emas.clear()
        gc.collect()
    return found, stats


def _in_between(step: int, kind: str, model: nn.Module, emas: dict[str, shardow.EMA], path: Path) -> None:
    for name in IN_BETWEEN:
        ema = emas[name]
        if step == 3:
            with ema.swapped(ema.decays[-1]):
                pass
        if step == 5:
            ema.save(path / name)
        if step == 6:
            ema.load(path / name)
        if step == 7:
            ema.reset()
    if step == 2 and kind != "fsdp1":  # which takes over what was put elsewhere when it gathers next
        for p in model.parameters():
            p.data = p.data.clone()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not equal({name: one[name]}, {name: other[name]})]
    assert not different, different


def process() -> tuple[int, int, int]:
    """Threads, descriptors, resident bytes."""
    gc.collect()
    threads, descriptors = (len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return threads, descriptors, next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))
