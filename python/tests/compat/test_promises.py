"""Counts what the sources promise: bytes that ranks hold and receive, and what rounding loses. Each way is beside the
one that its source had, written out in a few lines.

These are counts and no times, so a test holds them. `PYTHONPATH=python/tests:. python
python/tests/compat/test_promises.py` prints the figures of docs/performance.md, at 144 MiB.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ranks
import torch
import torch.distributed as dist
from benchmarks.process import MIB, used
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import shardow
from shardow.compat.dist_ema import DistEMA

WORLD, LAYERS, DECAY = 4, 9, 0.999
WIDTH = 512  # of 9 MiB; 2048: of 144
Counts = dict[str, dict[str, int]]


def units(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def counted(call: Callable[[], Any]) -> dict[str, int]:
    """Returns the bytes that this rank received."""
    return {"received": used(call)["received"]}


def whole_averages(model: FSDP) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """Returns the averages and the update of the first EMA_FSDP: each rank has all, and gathers all weights."""
    with FSDP.summon_full_params(model, writeback=False):
        averages = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update() -> None:
        with FSDP.summon_full_params(model, writeback=False):
            for name, weight in model.named_parameters():
                averages[name].mul_(DECAY).add_(weight, alpha=1 - DECAY)

    return averages, update


def gathered_by_units(model: FSDP) -> dict[str, torch.Tensor]:
    """FSDP's full state dict of rank 0: a unit at a time is gathered by all ranks."""
    whole = {}
    for name, unit in model.named_modules():
        if isinstance(unit, FSDP) and unit is not model:
            with FSDP.summon_full_params(unit, writeback=False):
                if dist.get_rank() == 0:
                    whole.update({f"{name}.{key}": weight.detach().clone() for key, weight in unit.named_parameters()})
    return whole


def of_sharded(width: int) -> Counts:
    """Source 000, under FSDP1."""
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    model = FSDP(nn.Sequential(*(FSDP(layer, **options) for layer in units(width))), **options)
    averages, update = whole_averages(model)
    ema = shardow.EMA(model, DECAY)
    ema.update(), update(), ema.full_state_dict()  # connections are made
    size = sum(tensor.nbytes for tensor in averages.values())
    return {
        "its averages": {"held": size},
        "averages": {"held": int(ema.stats()["bytes"])},
        "its update": counted(update),
        "update": counted(ema.update),
        "its export": counted(lambda: gathered_by_units(model)),
        "export": counted(ema.full_state_dict),
    }


def of_replicas(width: int) -> Counts:
    """Source 001: ranks divide the averages of a replicated model, and a state dict puts them together."""
    model = units(width)
    ema = DistEMA(model, WORLD, dist.get_rank(), decay=DECAY)
    flat = torch.cat([weight.detach().reshape(-1) for weight in model.parameters()])
    own = flat.chunk(WORLD)[dist.get_rank()].clone()

    def its_state() -> dict[str, torch.Tensor]:
        parts = [torch.empty_like(own) for _ in range(WORLD)]
        dist.all_gather(parts, own)
        whole, ends = torch.cat(parts), [0, *itertools.accumulate(weight.numel() for weight in model.parameters())]
        names = [name for name, _ in model.named_parameters()]
        return {name: whole[begin:end].clone() for name, begin, end in zip(names, ends, ends[1:], strict=False)}

    its_state(), ema.state_dict()
    return {
        "its state": counted(its_state),
        "state": counted(ema.state_dict),
    }


def errors_of_bfloat16() -> tuple[float, float]:
    """Source 003: returns the largest error after 60 steps of a bfloat16 model, of averages in the weights' dtype and
    of ours, in parts of the largest average."""
    torch.manual_seed(0)
    model = nn.Linear(256, 256).bfloat16()
    ema = shardow.EMA(model, DECAY)
    exact = {name: weight.detach().double() for name, weight in model.named_parameters()}
    narrow = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for _ in range(60):
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.add_(torch.randn_like(weight) * 0.05)
                exact[name].lerp_(weight.double(), 1 - DECAY)
                narrow[name].mul_(DECAY).add_(weight, alpha=1 - DECAY)
        ema.update()
    averages = ema.full_state_dict()
    most = max(float(tensor.abs().max()) for tensor in exact.values())
    return tuple(  # type: ignore[return-value]
        max(float((tensors[name].double() - exact[name]).abs().max()) for name in exact) / most
        for tensors in (narrow, averages)
    )


def total(by_rank: list[Counts], what: str, kind: str = "received") -> float:
    return sum(counts[what][kind] for counts in by_rank) / MIB


def most(by_rank: list[Counts], what: str, kind: str) -> float:
    return max(counts[what][kind] for counts in by_rank) / MIB


def size_of(width: int) -> float:
    return LAYERS * width * width * 4 / MIB


def test_sharded_averages_take_a_share_send_nothing_and_export_once() -> None:
    by_rank, size = ranks.run(WORLD, of_sharded, WIDTH), size_of(WIDTH)
    assert most(by_rank, "its averages", "held") == size
    assert most(by_rank, "averages", "held") == size / WORLD
    assert total(by_rank, "its update") > 2.9 * size
    assert total(by_rank, "update") < 0.01
    assert total(by_rank, "its export") > 2.9 * size
    assert total(by_rank, "export") < 0.78 * size


def test_a_state_of_replicas_is_put_together_on_one_rank() -> None:
    by_rank, size = ranks.run(WORLD, of_replicas, WIDTH), size_of(WIDTH)
    assert total(by_rank, "its state") > 2.9 * size
    assert total(by_rank, "state") < 0.78 * size


def test_averages_of_bfloat16_weights_lose_nothing_that_shows() -> None:
    narrow, ours = errors_of_bfloat16()
    assert narrow > 1e-3
    assert ours < 1e-6


if __name__ == "__main__":
    sharded, replicas = (ranks.run(WORLD, of, 2048) for of in (of_sharded, of_replicas))
    for by_rank, names in ((sharded, ("update", "export")), (replicas, ("state",))):
        if by_rank is sharded:
            held = [most(by_rank, what, "held") for what in ("its averages", "averages")]
            print("averages a rank: its {:.0f} MiB, ours {:.0f} MiB".format(*held))
        for name in names:
            for whose, what in (("its", f"its {name}"), ("ours", name)):
                print(f"  {name}, {whose}: received {total(by_rank, what):.0f} MiB by all ranks")
    print("errors after 60 steps in bfloat16: its {:.1e}, ours {:.1e}".format(*errors_of_bfloat16()))
