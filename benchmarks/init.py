"""``python -m benchmarks.init``: how a model of 500 M parameters gets its weights on 4 ranks of FSDP2, beside what is
used elsewhere.

Measured are seconds, memory at the peak, and bytes read and received.

Every candidate starts from the same safetensors file, in fresh processes, in an order drawn anew each round; the file
is in the page cache for all. Ranks are forked from a process that has imported everything, so that their memory is what
the start takes. Where weights are held on rank 0 first, that is counted apart, as ``source``.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks import report
from benchmarks.measure import Bar, at_most
from benchmarks.process import MIB, Samples, Usage, by_rank, used

WORLD = 4
WIDTH, LAYERS, WORDS = 2048, 8, 32768  # 537 M parameters; the largest tensor is the embedding, 256 MiB
PICTURE = report.PAGE.parent / "pictures" / "init.png"


# ---- the model


def block(width: int) -> nn.Module:
    """The parameters of a transformer's block; no forward pass is made."""
    sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    return nn.Sequential(nn.LayerNorm(width), *(nn.Linear(*size) for size in sizes))


def build(width: int, layers: int) -> nn.Module:
    words = WORDS * width // WIDTH
    blocks = (block(width) for _ in range(layers))
    return nn.Sequential(nn.Embedding(words, width), *blocks, nn.Linear(width, words, bias=False))


def on_meta(width: int, layers: int) -> nn.Module:
    with torch.device("meta"):
        return build(width, layers)


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    for unit in model.children():
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def write(width: int, layers: int, path: Path) -> None:
    """A file whose weights rise by 1e-3, from the number of the parameter on."""
    import shardow

    model = on_meta(width, layers).to_empty(device="cpu")
    for i, p in enumerate(model.parameters()):
        p.data.view(-1)[:] = torch.arange(p.numel(), dtype=torch.float32).mul_(1e-3).add_(i)
    shardow.save(model, path)


def is_right(i: int, param: torch.Tensor) -> bool:
    """Compares the last of this rank's elements with those of the file."""
    assert isinstance(param, DTensor)
    local = param.to_local().view(-1)
    begin = dist.get_rank() * -(-param.shape[0] // WORLD) * (param.numel() // param.shape[0])
    elements = torch.arange(begin, begin + local.numel(), dtype=torch.float32)[-1000:]
    return torch.equal(local[-1000:], elements.mul_(1e-3).add_(i))


# ---- the candidates


Start = Callable[[int, int, Path], nn.Module]  # (width, layers, file)
bytes_held_first: list[int] = []


def first_rank_loads(path: Path) -> dict[str, torch.Tensor] | None:
    """Mapped, as load_file() gives it: pages count where they are touched."""
    from safetensors.torch import load_file

    if dist.get_rank() != 0:
        return None
    source = load_file(path)
    bytes_held_first.append(sum(tensor.nbytes for tensor in source.values()))
    return source


def materialize(width: int, layers: int, path: Path, source: Callable[[Path], Any]) -> nn.Module:
    import shardow

    with shardow.meta_init():
        model = build(width, layers)
    shard(model)
    shardow.materialize(model, source(path))
    return model


def set_model_state_dict(width: int, layers: int, path: Path) -> nn.Module:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model = on_meta(width, layers)
    shard(model)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
    set_model_state_dict(model, first_rank_loads(path) or {}, options=options)
    return model


def accelerate(width: int, layers: int, path: Path) -> nn.Module:
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    class Accelerator:  # all that it asks of one
        is_main_process = dist.get_rank() == 0

    model = on_meta(width, layers)
    shard(model)
    fsdp2_load_full_state_dict(Accelerator(), model, first_rank_loads(path) or {})
    return model


def every_rank_loads(width: int, layers: int, path: Path) -> nn.Module:
    from safetensors.torch import load_file

    model = on_meta(width, layers).to_empty(device="cpu")
    model.load_state_dict(load_file(path))
    return shard(model)


def every_rank_maps(width: int, layers: int, path: Path) -> nn.Module:
    """The whole model mapped into each rank, whose own part alone is touched; the file's tensors become the
    parameters."""
    from safetensors.torch import load_file

    model = on_meta(width, layers)
    model.load_state_dict(load_file(path), assign=True)
    return shard(model)


FILE, FIRST, BY_MODULE = (
    "shardow: every rank reads its own",
    "shardow: from rank 0",
    "shardow: by initialisation, module by module",
)
STARTS: dict[str, Start] = {
    FILE: partial(materialize, source=lambda path: path),
    "every rank loads the whole": every_rank_loads,
    "every rank maps the whole": every_rank_maps,
    FIRST: partial(materialize, source=first_rank_loads),
    "set_model_state_dict, broadcast_from_rank0": set_model_state_dict,
    "accelerate, fsdp2_load_full_state_dict": accelerate,
    # From no file: each module's reset_parameters(), whole, on every rank. It has no rival: once is enough.
    BY_MODULE: partial(materialize, source=lambda path: None),
}
DRAWN = {
    "every rank loads the whole": "every rank loads the whole",
    FILE: "every rank reads its own",
    "set_model_state_dict, broadcast_from_rank0": "set_model_state_dict,\nbroadcast_from_rank0",
    FIRST: "from rank 0",
}


# ---- measuring


@dataclass
class Results:
    elements: int
    largest: int  # bytes of a tensor
    samples: Samples = field(default_factory=Samples)


def run(
    width: int = WIDTH, layers: int = LAYERS, rounds: int = 5, folder: Path | None = None, picture: Path | None = None
) -> Results:
    """``picture``: of memory over time, from another round."""
    import shardow

    sizes = [(p.numel(), p.nbytes) for p in on_meta(width, layers).parameters()]
    results = Results(sum(elements for elements, _ in sizes), max(size for _, size in sizes))
    order = random.Random(0)
    with tempfile.TemporaryDirectory(dir=folder) as path:
        file = Path(path) / "model.safetensors"
        write(width, layers, file)
        for round_ in range(rounds):
            for name in order.sample(list(STARTS), len(STARTS)):
                if name != BY_MODULE or round_ == 0:
                    results.samples.add(name, start(name, width, layers, file))
        if picture is not None:
            drawn = {title: start(name, width, layers, file, True) for name, title in DRAWN.items()}
            timelines = {title: shardow.memory.Timeline(ranks[0]["timeline"]) for title, ranks in drawn.items()}
            shardow.memory.draw(timelines, picture)
    return results


def start(name: str, width: int, layers: int, file: Path, sampled: bool = False) -> list[Usage]:
    ranks = by_rank(WORLD, on_rank, name, width, layers, file, sampled)
    if name != BY_MODULE and any(not rank["right"] for rank in ranks):
        sys.exit(f"{name}: weights are not those of the file")
    return ranks


def on_rank(name: str, width: int, layers: int, file: Path, sampled: bool) -> Usage:
    """Until all ranks have their weights. ``sampled``: with a timeline, which takes some of the time."""
    import shardow

    dist.all_reduce(torch.zeros(1))  # makes the connections
    models: list[nn.Module] = []
    with shardow.memory.timeline() if sampled else contextlib.nullcontext() as timeline:
        usage = used(lambda: models.append(STARTS[name](width, layers, file)))
    return {
        **usage,
        "source": sum(bytes_held_first),
        "timeline": timeline.ranks if timeline is not None else None,
        "right": all(is_right(i, param) for i, param in enumerate(models[0].parameters())),
    }


# ---- the tables


def bars(results: Results) -> list[Bar]:
    """Returns what is asked of a start."""
    samples, largest = results.samples, results.largest / MIB
    own = results.elements * 4 / WORLD

    def beyond(name: str, ranks: slice = slice(None)) -> float:
        return (samples.most(name, "memory", ranks) - own) / MIB

    source = samples.most(FIRST, "source") / MIB
    shared = beyond(FIRST, slice(1)) - source
    asked = [
        at_most("init from a file: MiB of memory beyond the own shard", beyond(FILE), 64),
        at_most("init from a file: bytes read, of the own ones", samples.most(FILE, "read") / own, 1.02),
        at_most("init from rank 0: MiB of memory beyond the own shard, others", beyond(FIRST, slice(1, None)), 64),
        at_most("init from rank 0: MiB beyond own shard and source, rank 0", shared, 64 + largest),
        at_most("init from rank 0: bytes received, of the own ones", samples.most(FIRST, "received") / own, 1.02),
        at_most("init by module: MiB of memory beyond the own shard", beyond(BY_MODULE), 64 + largest),
    ]
    for ours, rivals in ((FILE, ("every rank loads", "every rank maps")), (FIRST, ("set_model", "accelerate"))):
        for name in STARTS:
            if name.startswith(rivals):
                ratios = [a / b for a, b in zip(samples.rounds(ours), samples.rounds(name), strict=True)]
                asked.append(at_most(f"{ours}: times as long as {name}", statistics.median(ratios), 1.0))
    return asked


def lines(results: Results) -> list[str]:
    samples = results.samples
    rounds = max(len(by_round) for by_round in samples.by_name.values())
    rows = []
    for name in samples.by_name:
        memory = [samples.most(name, "memory", ranks) for ranks in (slice(1), slice(1, None))]
        amounts = [f"{size / MIB:.0f}" for size in memory] + samples.mib(name, "read", "received")
        rows.append([name, samples.seconds(name), *amounts])
    head = ("", "seconds, median (range)", "MiB on rank 0", "MiB on others", "MiB read", "MiB received")
    return [
        f"{results.elements / 1e6:.3g} M parameters on {WORLD} ranks, {rounds} rounds; "
        f"a shard is {results.elements * 4 / WORLD / MIB:.0f} MiB; "
        "of the rank that has most: memory at the peak above what it had, "
        "bytes read (by /proc/self/io) and received (by the kernel's count of its connections)",
        "",
        *report.table(head, rows),
    ]


if __name__ == "__main__":
    report.main(sys.modules[__name__])
