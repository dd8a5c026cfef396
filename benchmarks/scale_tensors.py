"""What calls cost against the number of tensors, in seconds of processors, in one process for each number: CPU tensors
of four elements, in modules of ten."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

import benchmarks.engine  # noqa: F401  # isort: split
import shardow
from benchmarks import scale_report
from shardow import _core
from shardow.base.collector import paused
from shardow.model.storage import engine_views

SIZES = (2_000, 20_000, 200_000, 1_000_000)
_EACH = 10  # parameters of a module
_BELOW = 0.5  # seconds, under which a call is made up to five times, else twice; the quickest counts
FITTED = 20_000  # from here on too: below it the constant parts of a call are seen


class Ten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i in range(_EACH):
            self.register_parameter(f"p{i}", nn.Parameter(torch.empty(4)))


def made(tensors: int) -> nn.Module:
    return nn.ModuleList(Ten() for _ in range(tensors // _EACH))


class Cost(Protocol):
    """Of a call; the quickest of several with ``again``."""

    def __call__(self, call: Callable[[], Any], again: bool = True) -> float: ...


def seconds_of(call: Callable[[], Any], again: bool = True) -> float:
    """Of processors, whichever thread's: what else goes on, and the disk, are not in it."""
    best, times = float("inf"), 0
    while times == 0 or (again and times < (5 if best < _BELOW else 2)):
        begin = time.process_time()
        kept = call()
        best, times = min(best, time.process_time() - begin), times + 1
        del kept
    return best


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def warm(folder: Path) -> None:
    """What is imported, or started, at the first call."""
    few, path = made(10 * _EACH), folder / "few.safetensors"
    of_averages(few, path)
    shardow.save(few, path)
    shardow.load(few, path)
    of_an_empty_model(10 * _EACH, path)


def at(tensors: int, folder: Path, cost: Cost = seconds_of) -> dict[str, float]:
    """What `cost` says, by call; and bytes."""
    warm(folder)
    model, path = made(tensors), folder / "model.safetensors"
    for one in model.parameters():
        nn.init.zeros_(one)
    return {
        "torch.empty": cost(lambda: [torch.empty(4) for _ in range(tensors)]),
        **of_averages(model, folder / "averages.safetensors", cost),
        "save()": cost(lambda: shardow.save(model, path)),
        "load()": cost(lambda: shardow.load(model, path)),
        **header(path, cost),
        **of_an_empty_model(tensors, path, cost),
        "bytes at the peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
    }


def of_averages(model: nn.Module, path: Path, cost: Cost = seconds_of) -> dict[str, float]:
    found = {"EMA()": cost(lambda: shardow.EMA(model, 0.99))}
    ema = shardow.EMA(model, 0.99)
    ema.update()
    found["update()"] = cost(ema.update)
    found["state_dict()"] = cost(ema.state_dict)
    state = ema.state_dict()
    found["load_state_dict()"] = cost(lambda: ema.load_state_dict(state))
    found["swap and back"] = cost(lambda: _swapped(ema))
    found["EMA.save(), first"] = cost(lambda: ema.save(path), again=False)
    found["EMA.save()"] = cost(lambda: ema.save(path))
    found["EMA.load()"] = cost(lambda: ema.load(path))
    found["open()"] = cost(lambda: shardow.open(path).close())
    found["later plan"] = _later_plan(ema, path, cost)
    return found


def bytes_of(tensors: int, _folder: Path) -> dict[str, float]:
    """Of the later half of a few: the first ones come with what is loaded. In a process of its own: what others leave
    costs nothing.
    """
    model = made(tensors)
    few = max(2, 100_000 // tensors)
    kept = [shardow.EMA(model, 0.99) for _ in range(few)]
    before = resident()
    kept += [shardow.EMA(model, 0.99) for _ in range(few)]
    return {"bytes of an EMA": (resident() - before) / few}


def of_an_empty_model(tensors: int, path: Path, cost: Cost = seconds_of) -> dict[str, float]:
    found = {"constructing it": cost(lambda: made(tensors)), "meta_init()": cost(lambda: _on_meta(tensors))}
    empty = _on_meta(tensors)
    return {**found, "materialize()": cost(lambda: shardow.materialize(empty, path), again=False)}


def _swapped(ema: shardow.EMA) -> None:
    with ema.swapped():
        pass


def _on_meta(tensors: int) -> nn.Module:
    with shardow.meta_init():
        return made(tensors)


def _later_plan(ema: shardow.EMA, path: Path, cost: Cost) -> float:
    """From parts of tensors to who writes what."""
    parts = ema._averages.parts(saving=True)

    def plan() -> _core.Save:
        views = engine_views([one.name for one in parts], [one.flat for one in parts], [one.region for one in parts])
        assert views is not None
        return _core.Save(_core.solo(), [_core.SaveFile("", views)], str(path))

    return cost(plan)


def header(path: Path, cost: Cost) -> dict[str, float]:
    """Of a file: written, and read strictly, beside Python's own parser of JSON; all without the collector, as open()
    reads them.
    """
    with path.open("rb") as file:
        text = file.read(int.from_bytes(file.read(8), "little"))
        data = path.stat().st_size - 8 - len(text)
    entries, metadata = _core.hooks.parse_header(text, data)
    tensors = [(name, dtype, shape) for name, dtype, shape, _, _ in entries]
    with paused():
        return {
            "json.loads": cost(lambda: json.loads(text)),
            "header read": cost(lambda: _core.hooks.parse_header(text, data)),
            "header written": cost(lambda: _core.hooks.header_of(tensors, metadata)),
        }


def run(sizes: list[int]) -> dict[int, dict[str, float]]:
    found = {}
    for size in sizes:
        found[size] = {**_alone("at", size), **_alone("bytes_of", size)}
        for what, value in found[size].items():
            each = (
                f"{value / size:.0f} bytes a tensor"
                if what.startswith("bytes")
                else f"{value:.3g} s, {1e6 * value / size:.3g} us a tensor"
            )
            print(f"{size:>9} tensors  {what:<18} {each}", flush=True)
    return found


def _alone(what: str, size: int) -> dict[str, float]:
    """In a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.scale_tensors", what, str(size), folder]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def lines(found: dict[int, dict[str, float]]) -> Iterator[str]:
    largest, least = max(found), min(found)
    for what in found[largest]:
        points = [(size, found[size][what]) for size in found]
        later = [(size, seconds) for size, seconds in points if size >= min(FITTED, largest)]
        powers = (
            f"{scale_report.exponent(points):.2f} (at most 1.1), from {FITTED} on ^{scale_report.exponent(later):.2f}"
        )
        if what != "later plan" or largest <= 400_000:
            yield f"{what} ~ tensors^{powers}"
    at_most = found[largest]
    yield f"EMA() is {at_most['EMA()'] / at_most['torch.empty']:.1f} times as many empty tensors of torch's (at most 3)"
    each = {size: found[size]["update()"] / size for size in (least, largest)}
    yield (
        f"update() of {largest} tensors is {each[largest] / each[least]:.2f} times that of {least}, for each "
        "tensor (at most 2)"
    )
    for what in ("header read", "header written"):
        yield f"{what}: {at_most[what] / at_most['json.loads']:.2f} times json.loads (at most 3)"
    for size in found:
        if size == 20_000:
            yield f"a later plan of {size} tensors takes {1e3 * found[size]['later plan']:.1f} ms (at most 10)"


if __name__ == "__main__":
    print(json.dumps({"at": at, "bytes_of": bytes_of}[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))))
