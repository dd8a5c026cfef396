"""Arena: memory for averages on one device, and the tensors that show it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shardow import _core

_ALIGN = 64  # bytes; the engine's kernels like averages to start there


class Arena:
    """``count`` averages of ``regions``, each tensor at a multiple of 64 bytes, uninitialised."""

    def __init__(self, regions: Sequence[_core.Region], dtype: torch.dtype, count: int, device: torch.device) -> None:
        begins, total = [], 0
        for one in regions:
            begins.append(total)
            total += -(-one.size * dtype.itemsize // _ALIGN) * _ALIGN
        stride = _core.arena_stride(total, count) if device.type == "cpu" else total
        self._memory = _memory((count - 1) * stride + total, device)
        with _disable_current_modes():  # whatever somebody does with operations of his own meanwhile
            #: Of each region its averages, 1-D.
            self.tensors = [
                [_slice(self._memory, k * stride + begin, one.size, dtype) for k in range(count)]
                for one, begin in zip(regions, begins, strict=True)
            ]

    @property
    def on_device(self) -> torch.Tensor | None:
        """All of it, where it is a device's."""
        return self._memory if isinstance(self._memory, torch.Tensor) else None


def _memory(size: int, device: torch.device) -> torch.Tensor | mmap.mmap:
    """Bytes, uninitialised. On a CPU a mapping of its own, whose pages take memory when they are written first."""
    if device.type == "cpu":
        return mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.empty(size, dtype=torch.uint8, device=device)


def _slice(memory: torch.Tensor | mmap.mmap, begin: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``count`` elements. From a mapping, a tensor with a storage of just its size, so that torch.save() writes no more
    than that.
    """
    if isinstance(memory, torch.Tensor):
        return memory[begin : begin + count * dtype.itemsize].view(dtype)
    if count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin)
