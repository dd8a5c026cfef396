"""A swap on two ranks, of which one is stopped, before any line of shardow's or at any step of the engine.

The same two processes take one point after the other, as a notebook's user does who goes on after each Ctrl-C. Nothing
may be left of the points before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from swap_seams import LINES_BEFORE_DEFERRAL, failing_engine
from torch import nn
from torch.distributed.tensor import DTensor

import shardow

Tensors = dict[str, torch.Tensor]

HOME = str(Path(shardow.__file__).parent)
EVERY = bool(os.environ.get("SHARDOW_ALL"))
STRIDE = 1 if EVERY else 29
OFTEN = 3
TIMEOUT = 3.0
LATE = TIMEOUT + 2.0
NEVER_CAME = "did not take part"


@dataclass
class Stop:
    """Where a rank is stopped, and whether it came there."""

    at: int
    where: str = ""  # empty: nowhere
    seen: int = 0


@contextmanager
def by_a_signal(stop: Stop) -> Iterator[None]:
    """SIGINT comes before the ``at``-th line of shardow's, of which each counts when it is run for the first times."""
    times: Counter[Any] = Counter()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        if event == "line":
            times[frame.f_code, frame.f_lineno] += 1
            stop.seen += times[frame.f_code, frame.f_lineno] <= OFTEN
            if stop.seen == stop.at + 1 and not stop.where:
                stop.where = f"{frame.f_code.co_filename[len(HOME) + 1 :]}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def by_the_engine(stop: Stop) -> Iterator[None]:
    """The engine finds no memory at one step of what it does, and at the next one too where that is its way back."""
    with failing_engine(stop.at // 2, 1 + stop.at % 2) as failed:
        yield
    if failed():
        stop.where = f"step {stop.at // 2} of the engine"


def by_block(ema: shardow.EMA) -> None:
    with ema.swapped():
        pass


def by_callbacks(ema: shardow.EMA) -> None:
    ema.swap_in()
    ema.swap_out()


_inside: list[AbstractContextManager[Any]] = []


def into_block(ema: shardow.EMA) -> None:
    _inside[:] = [ema.swapped()]
    _inside[0].__enter__()


def out_of_block(ema: shardow.EMA) -> None:
    _inside[0].__exit__(None, None, None)


Call = Callable[[shardow.EMA], None]
WAYS: dict[str, tuple[Call, Call]] = {  # what comes before, and what is stopped
    "block": (lambda ema: None, by_block),
    "callbacks": (lambda ema: None, by_callbacks),
    "restore": (shardow.EMA.swap_in, shardow.EMA.restore),
}
_STOPPED: dict[str, tuple[Call, Call]] = {
    "block": WAYS["block"],
    "swap_in": WAYS["callbacks"],
    "end of block": (into_block, out_of_block),
    "swap_out": (shardow.EMA.swap_in, shardow.EMA.swap_out),
    "restore": WAYS["restore"],
}
BEFORE = {  # the lines of a call in which signals are not held yet
    name: (way, LINES_BEFORE_DEFERRAL[name]) for name, way in _STOPPED.items()
}


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}{''.join(getattr(error, '__notes__', []))}"
    return ""


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Rank:
    """One of two. ``wrong``: what should not have been, and where the victim was stopped."""

    def __init__(self, ema: shardow.EMA, model: nn.Module, folder: str) -> None:
        self.me, self.wrong, self._path = dist.get_rank(), list[str](), f"{folder}/ema.safetensors"
        self._beside = dist.new_group()  # in nobody's way
        self._ema, self._model = ema, model

    def go_through_all(self) -> list[int]:
        """How many points each way had, by a signal and by the engine."""
        points = []
        for number, way in enumerate(WAYS):
            points += [
                self.go_through(way, by_a_signal, 10 * number, STRIDE),
                self.go_through(way, by_the_engine, 0, min(STRIDE, 5)),
            ]
        return points

    def go_through(self, way: str, by: Callable[[Stop], Any], begin: int, stride: int) -> int:
        """From one point to the next, until none is left. Returns how many there were."""
        at = begin
        for points in range(100_000):
            stop = Stop(at)
            missed = self.go_on_after(WAYS[way], by, stop, victim=points % 2)
            if missed is None:
                return points
            at += max(stride, 3 * missed)  # such points cost the other rank its timeout
        raise AssertionError("no end")

    def go_on_after(self, way: tuple[Call, Call], by: Callable[[Stop], Any], stop: Stop, victim: int) -> bool | None:
        """None where there is no such point. True where it came before the victim had begun, so that the other waited
        in vain.
        """
        ema, is_victim = self._ema, self.me == victim
        self.step()
        weights, averages = self._weights(), self._averages()
        way[0](ema)
        self._tell(None)
        began = time.monotonic()
        with by(stop) if is_victim else contextlib.nullcontext():
            found = outcome(lambda: way[1](ema))
        seconds, told = time.monotonic() - began, self._tell((found, stop.where))
        stop.where, missed = told[victim][1], NEVER_CAME in told[1 - victim][0]
        if not stop.where:
            self.expect(stop, not found, found)
            ema.restore()
            return None
        if is_victim:
            self.expect(
                stop, found.startswith(("KeyboardInterrupt", "MemoryError")) or "bad_alloc" in found, f"raised {found}"
            )
        else:
            fine = found.startswith(("PeerFailedError", "DeadlineError")) or not found
            self.expect(stop, fine and seconds < LATE, f"raised {found} after {seconds:.1f} s")
        self._is_right_or_says_so(stop, weights)
        self._tell(None)
        first = is_victim and missed
        first = self._succeeds(stop, ema.restore, first)
        self.expect(stop, same(self._weights(), weights), "other weights")
        self.expect(stop, same(self._averages(), averages), "other averages")
        for call in (lambda: by_block(ema), ema.update, lambda: ema.save(self._path)):
            first = self._succeeds(stop, call, first)
        return missed

    def _is_right_or_says_so(self, stop: Stop, weights: Tensors) -> None:
        if "restore()" not in outcome(self._ema.state_dict):
            self.expect(stop, same(self._weights(), weights), "no weights, and nobody says so")
            return
        self.expect(stop, "restore()" in outcome(self._ema.update), "update() is not refused")

    def _succeeds(self, stop: Stop, call: Callable[[], object], missed: bool) -> bool:
        """``missed``: this rank's first collective call may say that it missed one. Returns whether it has not yet said
        so.
        """
        found = outcome(call)
        if missed and NEVER_CAME in found:
            missed, found = False, outcome(call)
        self.expect(stop, not found, f"afterwards: {found}")
        return missed

    def expect(self, stop: Stop, right: bool, what: str) -> None:
        if not right:
            self.wrong.append(f"rank {self.me}, stopped {stop.at}: {stop.where}: {what}")

    def step(self) -> None:
        """Weights move, and averages after them."""
        with torch.no_grad():
            for at, parameter in enumerate(self._model.parameters()):
                parameter.add_(0.5 + at)
        self._ema.update()

    def _weights(self) -> Tensors:
        """Copies of this rank's parts of all parameters and buffers."""
        for module in self._model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        return {name: self.local(tensor).detach().clone() for name, tensor in tensors}

    @staticmethod
    def local(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _averages(self) -> Tensors:
        return {name: tensor.clone() for name, tensor in self._ema.state_dict()["averages"].items()}

    def _tell(self, what: Any) -> list[Any]:
        everybody = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, what, group=self._beside)
        return everybody
