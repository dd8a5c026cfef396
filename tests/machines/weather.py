"""What a test changes while other processes look at it; and links of a program's, between which it loses frames, holds
them back or stops.

The kernel's own ways to do that (netem) are seldom there. Frames go to all machines, as in a hub; TCP makes up for what
is lost.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import mmap
import os
import pickle
import random
import select
import struct
import time
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_SET_INTERFACE, _FRAMES_ALONE = 0x400454CA, 0x0002 | 0x1000
_MOST = 65536


class Shared(Generic[T]):
    """A value that processes have in common, which were forked from whoever made it. Seldom changed."""

    def __init__(self, value: T) -> None:
        self._memory = mmap.mmap(-1, 4096)
        self.change(value)

    def change(self, value: T) -> None:
        text = pickle.dumps(value)
        self._memory[: len(text)] = text

    def now(self) -> T:
        found: T = pickle.loads(self._memory[:])
        return found


@dataclass(frozen=True)
class Weather:
    """``delay``: seconds that a frame is on its way, give or take half; ``loss``: the share of frames that never
    arrive; ``calm``: nothing moves at all."""

    delay: float = 0.0
    loss: float = 0.0
    calm: bool = False


def end_of_link(name: str) -> int:
    """The other end of a new interface of this process's network."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _FRAMES_ALONE))
    return device


def carry(ends: list[int], weather: Shared[Weather], seed: int) -> None:
    """Frames from each end to all others, for ever."""
    drawn, number = random.Random(seed), itertools.count()
    on_the_way: list[tuple[float, int, int, bytes]] = []
    while True:
        wait = max(0.0, min(on_the_way[0][0] - time.monotonic(), 0.05)) if on_the_way else 0.05
        ready: list[Any] = select.select(ends, [], [], wait)[0]
        now, here = time.monotonic(), weather.now()
        for end in ready:
            frame = os.read(end, _MOST)
            for other in ends:
                if other != end and not here.calm and drawn.random() >= here.loss:
                    heapq.heappush(on_the_way, (now + here.delay * (0.5 + drawn.random()), next(number), other, frame))
        while on_the_way and on_the_way[0][0] <= now:
            _, _, other, frame = heapq.heappop(on_the_way)
            os.write(other, frame)
