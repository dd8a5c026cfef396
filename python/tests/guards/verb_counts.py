"""Counts what a collective verb passes through on two ranks: rounds, calls of torch's store, files of shardow whose
functions run. ``python python/tests/guards/verb_counts.py`` prints them; test_verb_counts.py compares them."""

from __future__ import annotations

import functools
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

import shardow

sys.path.insert(0, str(Path(__file__).parents[1]))
import models
import ranks

WORLD = 2
HOME = f"{Path(shardow.__file__).parent}/"
_OPERATIONS = (
    "add", "append", "check", "compare_set", "delete_key", "get", "multi_get", "multi_set", "set", "wait",
)  # fmt: skip
_ROUND = re.compile(r"\d+(?=/)")  # each rank counts itself in, below the number of the round


@dataclass(frozen=True)
class Counts:
    rounds: int
    operations: int
    files: int


class Recorder:
    """Counts what this process does while count() runs, on all threads. One of a process, made before shardow has
    started any thread."""

    def __init__(self) -> None:
        self._counts = False
        self._rounds: set[tuple[int, str]] = set()
        self._stores: list[Any] = []  # their ids stay theirs
        self._files: set[str] = set()
        self._operations = 0
        for store in (Store, *Store.__subclasses__()):
            for name in set(_OPERATIONS) & vars(store).keys():
                setattr(store, name, self._counted(name, getattr(store, name)))
        threading.setprofile(self._profile)

    def count(self, call: Callable[[], Any]) -> Counts:
        self._rounds, self._stores, self._files, self._operations = set(), [], set(), 0
        dist.barrier()
        sys.setprofile(self._profile)
        self._counts = True
        try:
            call()
        finally:
            self._counts = False
            sys.setprofile(None)
        return Counts(len(self._rounds), self._operations, len(self._files))

    def _counted(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def counted(store: Any, *args: Any, **options: Any) -> Any:
            if self._counts:
                self._operations += 1
                number = _ROUND.match(args[0]) if name == "add" else None
                if number:
                    self._stores.append(store)
                    self._rounds.add((id(store), number[0]))
            return operation(store, *args, **options)

        return counted

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self._counts and event == "call" and code.co_filename.startswith(HOME) and code.co_name != "<module>":
            self._files.add(code.co_filename)


def swaps(ema: shardow.EMA) -> dict[str, Callable[[], object]]:
    block = ema.swapped()
    return {
        "swapped(), in": block.__enter__,
        "swapped(), out": lambda: block.__exit__(None, None, None),
    }


def verbs(kind: str, folder: Path) -> dict[str, Callable[[], object]]:
    """Returns the verbs in the order in which they are called."""
    model = models.build(kind, WORLD)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8, models.INPUTS)).square().sum().backward()
    optimizer.step()
    ema = shardow.EMA(model, 0.99)
    if kind != "fsdp2":
        return swaps(ema)
    run = shardow.Checkpoints(folder / "run")
    with shardow.meta_init():
        empty = models.build(kind, WORLD)
    return {
        "EMA()": lambda: shardow.EMA(model, 0.99),
        "update()": ema.update,
        "full_state_dict()": ema.full_state_dict,
        **swaps(ema),
        "EMA.save()": lambda: ema.save(folder / "ema.safetensors"),
        "EMA.load()": lambda: ema.load(folder / "ema.safetensors"),
        "save()": lambda: shardow.save(model, folder / "model.safetensors"),
        "load()": lambda: shardow.load(model, folder / "model.safetensors"),
        "materialize()": lambda: shardow.materialize(empty, folder / "model.safetensors"),
        "merge()": lambda: shardow.merge([folder / "model.safetensors"] * 2, folder / "merged.safetensors"),
        "Checkpoints.save().wait()": lambda: run.save(1, model, ema, optimizer, asynchronous=True).wait(),
        "Checkpoints.restore()": lambda: run.restore(model, ema, optimizer),
    }


def on_a_rank(kind: str, folder: str) -> dict[str, Counts]:
    """Counts the second time: by then all is imported."""
    recorder = Recorder()
    counts: dict[str, Counts] = {}
    for time in ("first", "second"):
        at = Path(folder) / time
        at.mkdir(exist_ok=True)
        counts = {f"{verb}, {kind}": recorder.count(call) for verb, call in verbs(kind, at).items()}
    return counts


def measured() -> dict[str, Counts]:
    """Returns the most of both ranks, by verb and kind of sharding."""
    counts: dict[str, Counts] = {}
    for kind in ("fsdp2", "ddp"):
        pool = ranks.Pool()
        with tempfile.TemporaryDirectory() as folder:
            try:
                first, second = pool.run(WORLD, on_a_rank, kind, folder)
            finally:
                pool.stop()
        for verb in first:
            one, other = first[verb], second[verb]
            operations = one.operations + other.operations
            counts[verb] = Counts(max(one.rounds, other.rounds), operations, max(one.files, other.files))
    return counts


def main() -> None:
    print(f"{'':34} rounds  operations  files")
    for verb, counts in measured().items():
        print(f"{verb:34} {counts.rounds:6}  {counts.operations:10}  {counts.files:5}")


if __name__ == "__main__":
    main()
