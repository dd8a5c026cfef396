"""What calls cost against the number of tensors, in one process: CPU tensors of four elements, in modules of ten.
benchmarks/scale.py starts it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

import benchmarks.engine  # noqa: F401  # isort: split
import shardow
from shardow import _core

_EACH = 10  # parameters of a module
_BELOW = 0.5  # seconds, under which a call is made up to five times, else twice; the quickest counts


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
    """Of processors, whichever thread's: other programs and the disk are not in it."""
    best, times = float("inf"), 0
    while times == 0 or (again and times < (5 if best < _BELOW else 2)):
        begin = time.process_time()
        kept = call()
        best, times = min(best, time.process_time() - begin), times + 1
        del kept
    return best


class Instructions:
    """Of all threads, in user space, under valgrind."""

    def __init__(self, counts: Path) -> None:
        self._counts, self._dumps, self._own = counts, 0, 0.0
        self._own = self(lambda: None)  # of switching

    def __call__(self, call: Callable[[], Any], again: bool = True) -> float:
        self._control("--instr=on")
        kept = call()
        self._control("--instr=off")
        self._control("--dump")
        self._dumps += 1
        del kept
        text = self._counts.with_name(f"{self._counts.name}.{self._dumps}").read_text()
        (count,) = [int(line.split()[1]) for line in text.splitlines() if line.startswith("totals:")]
        return count - self._own

    def _control(self, what: str) -> None:
        subprocess.run(["callgrind_control", what, str(os.getpid())], check=True, capture_output=True)


def at(tensors: int, folder: Path, cost: Cost = seconds_of) -> dict[str, float]:
    """The cost by call, when everything has been called once for a few tensors."""
    _calls(10 * _EACH, folder, lambda call, again=True: float(call() is None))
    return _calls(tensors, folder, cost)


def _calls(tensors: int, folder: Path, cost: Cost) -> dict[str, float]:
    model, path = made(tensors), folder / "model.safetensors"
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    found = {"torch.empty": cost(lambda: [torch.empty(4) for _ in range(tensors)])}
    found |= of_averages(model, folder / "averages.safetensors", cost)
    found["save()"] = cost(lambda: shardow.save(model, path))
    found["load()"] = cost(lambda: shardow.load(model, path))
    found |= header(path, cost)
    found["constructing it"] = cost(lambda: made(tensors))
    found["meta_init()"] = cost(lambda: _on_meta(tensors))
    empty = _on_meta(tensors)
    found["materialize()"] = cost(lambda: shardow.materialize(empty, path), again=False)
    return found


def of_averages(model: nn.Module, path: Path, cost: Cost) -> dict[str, float]:
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
    return found


def header(path: Path, cost: Cost) -> dict[str, float]:
    """Of a file: written, and read strictly, beside Python's own parser of JSON."""
    with path.open("rb") as file:
        text = file.read(int.from_bytes(file.read(8), "little"))
        data = path.stat().st_size - 8 - len(text)
    entries, metadata = _core.hooks.parse_header(text, data)
    tensors = [(name, dtype, shape) for name, dtype, shape, _, _ in entries]
    return {
        "json.loads": cost(lambda: json.loads(text)),
        "header read": cost(lambda: _core.hooks.parse_header(text, data)),
        "header written": cost(lambda: _core.hooks.header_of(tensors, metadata)),
    }


def bytes_of(tensors: int, _folder: Path) -> dict[str, float]:
    """Of the later half of a few averages: the first ones come with libraries that are loaded."""
    model, few = made(tensors), max(2, 100_000 // tensors)
    kept = [shardow.EMA(model, 0.99) for _ in range(few)]
    before = _resident()
    kept += [shardow.EMA(model, 0.99) for _ in range(few)]
    return {"bytes of an EMA": (_resident() - before) / few}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _swapped(ema: shardow.EMA) -> None:
    with ema.swapped():
        pass


def _on_meta(tensors: int) -> nn.Module:
    with shardow.meta_init():
        return made(tensors)


def work(tensors: int, folder: Path) -> dict[str, float]:
    return at(tensors, folder, Instructions(folder / "counts"))


if __name__ == "__main__":
    print(json.dumps({"at": at, "bytes_of": bytes_of, "work": work}[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))))
