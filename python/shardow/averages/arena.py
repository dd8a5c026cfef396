"""Arena: memory for averages on one device, and the tensors that show it, made when somebody asks for one. An update
needs none.
"""

from __future__ import annotations

import mmap
from functools import cached_property

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shardow import _core
from shardow.model import storage

_ALIGN = 64  # bytes; the engine's kernels like averages to start there


class Arena:
    """``count`` averages of ``regions``, each tensor at a multiple of 64 bytes, uninitialised. ``names``: of the
    regions' tensors.
    """

    def __init__(
        self,
        names: list[str],
        regions: list[_core.Region],
        dtype: torch.dtype,
        engines: str,
        count: int,
        device: torch.device,
    ) -> None:
        """``engines``: the engine's name of ``dtype``."""
        self._names, self._regions, self._dtype, self._count = names, regions, dtype, count
        self._layout = _core.Layout(regions, engines, _ALIGN)
        total = self._layout.bytes
        self._stride = _core.arena_stride(total, count) if device.type == "cpu" else total
        self._memory = _memory((count - 1) * self._stride + total, device)

    @property
    def on_device(self) -> torch.Tensor | None:
        """All of it, where it is a device's."""
        return self._memory if isinstance(self._memory, torch.Tensor) else None

    def __len__(self) -> int:
        """Tensors."""
        return len(self._names)

    def views(self, k: int) -> _core.Views | None:
        """The engine's descriptions of average ``k``; None where each tensor is to be looked at."""
        if isinstance(self._memory, torch.Tensor):
            return None
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        return storage.laid_out(self._layout, self._names, address + k * self._stride)

    @cached_property
    @torch.inference_mode(False)  # where averages would become tensors that nobody may write
    def tensors(self) -> list[list[torch.Tensor]]:
        """Of each region its averages, 1-D."""
        begins = self._layout.offsets()
        sizes = [one.size for one in self._regions]
        with (
            _disable_current_modes()
        ):  # whatever somebody does with operations of his own when the first one is asked for
            return [
                [_slice(self._memory, k * self._stride + begin, size, self._dtype) for k in range(self._count)]
                for begin, size in zip(begins, sizes, strict=True)
            ]


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
