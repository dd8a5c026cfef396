"""``python -m benchmarks.swaps``: averages into a model and its weights back, and whole averages on one rank, beside
what is used elsewhere: seconds, and memory above what averages take all the time.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardow
from benchmarks import report
from benchmarks.measure import Bar, at_most
from benchmarks.process import MIB, Samples, Usage, by_rank, used

WORLD = 2
SPLIT, COPY, WHOLE = "swapped() and back", 'swapped() and back, replicas="copy"', "full_state_dict() on rank 0"
STORED, GATHERED, TORCH_WHOLE = (
    "store(), copy_to(), restore() of diffusers",
    "averages gathered into a whole model on every rank",
    "get_model_state_dict(full_state_dict, cpu_offload)",
)
Results = dict[str, Samples]  # by the wrapper


def run(width: int = 2048, layers: int = 16, rounds: int = 5) -> Results:
    kinds = ("FSDP2", "DDP")
    return {kind: Samples.of_ranks(by_rank(WORLD, on_rank, kind, width, layers, rounds)) for kind in kinds}


def on_rank(kind: str, width: int, layers: int, rounds: int) -> dict[str, list[Usage]]:
    candidates = (under_fsdp2 if kind == "FSDP2" else under_ddp)(width, layers)
    for call in candidates.values():
        call()
    order, usage = random.Random(0), {name: list[Usage]() for name in candidates}
    for _ in range(rounds):
        for name in order.sample(list(candidates), len(candidates)):
            usage[name].append(used(candidates[name]))
    return usage


def network(width: int, layers: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


def swap_of(ema: shardow.EMA) -> Callable[[], None]:
    def swap_and_back() -> None:
        with ema.swapped():
            pass

    return swap_and_back


def stored(model: nn.Module) -> Callable[[], None]:
    from diffusers.training_utils import EMAModel

    parameters = list(model.parameters())
    ema = EMAModel(parameters)

    def swap_and_back() -> None:
        ema.store(parameters)
        ema.copy_to(parameters)
        ema.restore(parameters)

    return swap_and_back


def under_fsdp2(width: int, layers: int) -> dict[str, Callable[[], object]]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    mesh = init_device_mesh("cpu", (WORLD,))
    model, averages = (fully_shard(network(width, layers), mesh=mesh) for _ in range(2))
    whole, ema = network(width, layers), shardow.EMA(model, 0.99)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    @torch.no_grad()
    def gathered() -> None:
        for parameter, average in zip(whole.parameters(), averages.parameters(), strict=True):
            parameter.copy_(average.full_tensor())

    return {
        SPLIT: swap_of(ema),
        STORED: stored(model),
        GATHERED: gathered,
        WHOLE: ema.full_state_dict,
        TORCH_WHOLE: lambda: get_model_state_dict(averages, options=options),
    }


def under_ddp(width: int, layers: int) -> dict[str, Callable[[], object]]:
    model = nn.parallel.DistributedDataParallel(network(width, layers))
    split, copied = shardow.EMA(model, 0.99), shardow.EMA(model, 0.99, replicas="copy")
    return {SPLIT: swap_of(split), COPY: swap_of(copied), STORED: stored(model)}


def lines(results: Results) -> list[str]:
    parts = (slice(1), slice(1, None))  # of ranks: the first, the others
    rows = [
        [kind, name, samples.seconds(name), *(f"{samples.most(name, 'memory', ranks) / MIB:.0f}" for ranks in parts)]
        for kind, samples in results.items()
        for name in samples.by_name
    ]
    head = ("", "averages in and weights back", "seconds, median (range)", "MiB on rank 0", "MiB on others")
    return [f"Swaps on {WORLD} ranks; memory at the peak above what was there before", "", *report.table(head, rows)]


def bars(results: Results) -> list[Bar]:
    """Returns what is asked of a swap: no slower than what needs no communication, where it needs none either."""
    sharded, replicas = results["FSDP2"], results["DDP"]
    return [
        at_most("FSDP2: a swap and back, times diffusers' of the same shards", sharded.ratio(SPLIT, STORED), 1),
        at_most('DDP, replicas="copy": a swap and back, times diffusers\'', replicas.ratio(COPY, STORED), 1),
    ]


if __name__ == "__main__":
    report.main(sys.modules[__name__])
