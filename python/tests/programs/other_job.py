"""Another job, which knows nothing of the program's: its own processes, store and model. It saves to the same path, one
version after the other, until it is told that it is enough, or killed.

The two jobs see each other's files alone. So that a test can tell them what to do there are marks, empty files in a
folder of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import models
import ranks
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

import shardow
from programs.story import Kept, Line, Tensors, weights_at

_LONGEST = 60.0  # seconds
_MOST = 400  # versions

_jobs = ranks.Pool()
atexit.register(_jobs.stop)


class Marks:
    """Of one line of a program."""

    def __init__(self, folder: str | Path, number: int) -> None:
        self._folder, self._number = Path(folder), number

    def path(self, what: str) -> Path:
        return self._folder / f"{self._number}-{what}"

    def make(self, what: str) -> None:
        self.path(what).touch()

    def wait(self, what: str) -> None:
        deadline = time.monotonic() + _LONGEST
        while not self.path(what).exists():
            assert time.monotonic() < deadline, f"nobody says {what}"
            time.sleep(0.005)

    def versions(self) -> int:
        """That the other job has begun to save."""
        return self.path("versions").stat().st_size if self.path("versions").exists() else 0


@functools.lru_cache(_MOST)
def version(seed: int, names: str, number: int) -> Kept:
    """What the other job saves: (averages, steps)."""
    like = models.make() if names == "same" else models.make_even()
    return weights_at(seed + number, {name: p.detach() for name, p in like.named_parameters()}), number + 1


class OtherJobs(threading.Thread):
    """Runs the other job of every line that has one, when the line asks for it."""

    def __init__(self, lines: tuple[Line, ...], folder: Path, marks: Path) -> None:
        super().__init__(daemon=True)
        self._wanted = [
            (number, line[-1]) for number, line in enumerate(lines) if line[0] in ("two jobs", "killed") and line[-1]
        ]
        self._lines, self._folder, self._marks = lines, folder, marks
        self._over = threading.Event()
        self._errors: list[Exception] = []
        self.start()

    def end(self) -> None:
        """The program's job is over. Raises what another one raised."""
        self._over.set()
        self.join()
        for error in self._errors:
            raise error

    def run(self) -> None:
        for number, (names, seed, dies) in self._wanted:
            marks = Marks(self._marks, number)
            while not marks.path("wanted").exists():
                if self._over.wait(0.005):
                    return
            try:
                path = str(self._folder / self._lines[number][2])
                _jobs.run(
                    2,
                    save,
                    names,
                    seed,
                    dies,
                    path,
                    str(self._marks),
                    number,
                    timeout=_LONGEST,
                    may_die=dies is not None,
                )
            except Exception as error:
                self._errors.append(error)
            marks.make("over")


def save(names: str, seed: int, dies: tuple[int, float] | None, path: str, folder: str, number: int) -> None:
    """On each rank of the other job. ``dies``: which of them is killed, and after how many seconds."""
    marks, rank = Marks(folder, number), dist.get_rank()
    model = models.PARALLEL["fsdp2"](models.make() if names == "same" else models.make_even(), dist.get_world_size())
    ema = shardow.EMA(model, decay=0.5, timeout=5 if dies else _LONGEST)
    with contextlib.suppress(Exception) if dies else contextlib.nullcontext():
        for at in range(_MOST):
            averages, steps = version(seed, names, at)
            _set(model, averages)
            ema.reset()
            ema.update(step=steps)
            if rank == 0:
                with marks.path("versions").open("ab") as file:
                    file.write(b".")
            ema.save(path)
            if at == 0 and rank == 0:
                marks.make("ready")
            if at == 0 and dies and dies[0] == rank:
                threading.Timer(dies[1], os.kill, (os.getpid(), signal.SIGKILL)).start()
            if _told(marks.path("enough").exists()):
                break
    if dies and dies[0] == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def _told(enough: bool) -> bool:
    """By rank 0, since a mark may appear between the looks of two ranks."""
    told: list[Any] = [enough]
    dist.broadcast_object_list(told, 0)
    return bool(told[0])


def _set(model: Any, weights: Tensors) -> None:
    for name, p in model.named_parameters():
        p.to_local().detach().copy_(
            distribute_tensor(weights[name], p.device_mesh, p.placements, src_data_rank=None).to_local()
        )
