"""timeline(): a process's memory over time: what the kernel and torch's allocator say, sampled by a thread."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from shardow.base.checks import seconds, unsupported

if TYPE_CHECKING:
    import torch.distributed as dist

    from shardow.distributed.rank_group import RankGroup

_MOST = 4096  # samples; then every two become one
_SHARE = 0.02  # of the time, for what is costly to ask: PSS needs a walk over all pages

Series = list[tuple[float, int]]  # (seconds since the epoch, bytes)


@dataclass
class Samples:
    """``resident``: of the process (RSS); ``proportional``: with what several processes share divided among them (PSS).
    ``device``: allocated by torch on the accelerator, empty without one. ``before`` and ``peak``: resident bytes at the
    start, and the most there were, by the kernel's own count where it rose."""

    rank: int
    resident: Series = field(default_factory=list)
    proportional: Series = field(default_factory=list)
    device: Series = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    before: int = 0
    peak: int = 0


@dataclass
class Timeline:
    """Of one block. ``ranks`` are all ranks' samples, on every rank, once the block has ended; while it runs, and where
    it raised, this rank's alone."""

    ranks: list[Samples] = field(default_factory=list)
    _sampler: Sampler | None = None

    def mark(self, what: str) -> None:
        """Names the instant, for the picture."""
        if self._sampler is not None:
            self._sampler.mark(what)

    def peaks(self) -> dict[str, int]:
        """Bytes of each rank. {"rank0/peak": the most that were resident, "rank0/above": above what was there at the
        start, "rank0/device": the most on its accelerator, ...}."""
        found = {}
        for one in self.ranks:
            found[f"rank{one.rank}/peak"] = one.peak
            found[f"rank{one.rank}/above"] = one.peak - one.before
            if one.device:
                found[f"rank{one.rank}/device"] = max(amount for _, amount in one.device)
        return found


@contextlib.contextmanager
def timeline(
    interval: float = 0.01, *, group: dist.ProcessGroup | None = None, timeout: float | timedelta | None = None
) -> Iterator[Timeline]:
    """Samples the memory of every rank during the block.

    Collective at its end: with torch.distributed, over ``group``, by default all ranks; if the block raises, nothing is
    exchanged::

        with shardow.memory.timeline() as t:
            model = build()
            t.mark("built")
            ...
        shardow.memory.draw({"": t}, "memory.png")

    Resident bytes (RSS) are read from /proc every ``interval`` seconds, proportional ones (PSS) as often as 2 % of the
    time allow, a device's from torch's allocator.

    Raises:
        NotImplementedError: there is no /proc; TimeoutError: a rank did not come to the end.
    """
    ranks = _ranks(group, timeout)
    if not sys.platform.startswith("linux"):
        raise unsupported(f"memory.timeline() reads /proc, which {sys.platform} does not have")
    sampler = Sampler(0 if ranks is None else ranks.rank, interval)
    found = Timeline([sampler.samples], sampler)
    sampler.start()
    try:
        yield found
    finally:
        sampler.stop()
        found._sampler = None
    if ranks is not None:
        by_rank = ranks.gather("memory.timeline()", json.dumps(asdict(sampler.samples)).encode())
        found.ranks = [Samples(**json.loads(one)) for one in by_rank]


def _ranks(group: dist.ProcessGroup | None, timeout: float | timedelta | None) -> RankGroup | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from shardow.distributed.rank_group import RankGroup

    return RankGroup(torch.distributed.group.WORLD if group is None else group, seconds(timeout))


class Sampler:
    """Samples this process from ``start()`` to ``stop()``."""

    def __init__(self, rank: int, interval: float) -> None:
        self.samples = Samples(rank)
        self._interval = interval
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="shardow-memory", daemon=True)
        self._next_proportional = 0.0

    def start(self) -> None:
        self._high_before = _told("status", "VmHWM:")
        self.samples.before = _told("status", "VmRSS:")
        self._sample(costly=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._sample(costly=True)
        high = _told("status", "VmHWM:")
        highest = max(amount for _, amount in self.samples.resident)
        self.samples.peak = max(high, highest) if high > self._high_before else highest

    def mark(self, what: str) -> None:
        self.samples.marks.append((time.time(), what))
        self._sample(costly=False)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            self._sample(costly=time.monotonic() >= self._next_proportional)

    def _sample(self, costly: bool) -> None:
        with self._lock:  # a mark comes from another thread
            now = time.time()
            self._add(self.samples.resident, now, _told("status", "VmRSS:"))
            device = _on_device()
            if device is not None:
                self._add(self.samples.device, now, device)
            if costly:
                began = time.monotonic()
                self._add(self.samples.proportional, now, _told("smaps_rollup", "Pss:"))
                self._next_proportional = time.monotonic() + (time.monotonic() - began) / _SHARE

    def _add(self, series: Series, now: float, amount: int) -> None:
        series.append((now, amount))
        if len(series) > _MOST:  # the highest of two: a peak is what one looks for
            series[:] = [max(pair, key=lambda one: one[1]) for pair in zip(series[::2], series[1::2], strict=False)]
            if series is self.samples.resident:
                self._interval *= 2


def _told(file: str, name: str) -> int:
    """Bytes, by a line of a file of /proc."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def _on_device() -> int | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.memory_allocated())
