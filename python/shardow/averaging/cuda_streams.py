"""Runs the engine's work on CUDA devices on torch's current streams, as torch runs its operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from shardow import _core, errors
from shardow.sharding import storage

T = TypeVar("T")


class Streams:
    """The stream of each device that the engine works on: the one that was current when the engine was last used. The
    device waits where streams differ, never the host."""

    def __init__(self, weights: Iterable[torch.Tensor], averages: Iterable[torch.Tensor]) -> None:
        """``averages``: those of one device all in one allocation."""
        devices = dict.fromkeys(map(storage.device_of, weights))
        self._memory = {memory.device: memory for memory in averages if memory.is_cuda}
        self._last = {
            device: torch.cuda.current_stream(device).cuda_stream for device in devices if device.type == "cuda"
        }

    def follow(self, average: _core.Average) -> None:
        for device, last in self._last.items():
            stream = torch.cuda.current_stream(device)
            if stream.cuda_stream == last:
                continue
            average.set_stream(device.index or 0, stream.cuda_stream)
            if device in self._memory:
                # Keeps torch from reusing the averages' memory until this stream is done.
                self._memory[device].record_stream(stream)
            self._last[device] = stream.cuda_stream


def with_memory(make: Callable[[], T]) -> T:
    """Returns ``make()``; where a device has no memory left, frees torch's cached blocks and calls it once more. The
    engine's tables are not of torch's allocator, which keeps the memory that it once had."""
    try:
        return make()
    except errors.OutOfMemoryError:
        torch.cuda.empty_cache()
        return make()
