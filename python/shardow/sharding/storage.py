"""Torch memory as the engine sees it, and which tensors lie on the same though they are different objects."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import torch

from shardow import _core
from shardow.sharding.local import LocalTensor, oddity

#: How and where tensors lie, cheap enough to be asked before every update.
MARKS = _core.Marks(torch.Tensor, torch.nn.Parameter)


def device_of(tensor: torch.Tensor) -> torch.device:
    """Where the engine is told that a tensor lies: one function, which tests replace on a machine without a device."""
    return tensor.device


@cache
def why_not(device: torch.device) -> str:
    """Returns why the engine's kernels don't serve a device; empty: they do."""
    if device.type == "cuda":
        return _core.cuda_refusal(device.index or 0)
    return "" if device.type == "cpu" else "the engine has kernels for CPUs and CUDA devices"


def engine_view(name: str, dtype: str, tensor: torch.Tensor, region: _core.Region) -> _core.TensorView:
    """Of a contiguous tensor on the CPU or a CUDA device, where the engine's work is enqueued on torch's current
    stream.
    """
    device = device_of(tensor)
    if device.type == "cpu":
        return _core.TensorView(name, dtype, region, tensor.data_ptr())
    stream = torch.cuda.current_stream(device).cuda_stream
    return _core.TensorView(name, dtype, region, tensor.data_ptr(), "cuda", device.index or 0, stream)


def storage_key(tensor: torch.Tensor) -> int:
    """Returns what tells storages apart, those on meta too."""
    return int(tensor.untyped_storage()._cdata)


def mapped(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor without values in a mapping of its own, which the system has back as soon as the tensor is gone.
    malloc() raises its threshold to what was freed last, takes the next large tensors from its heap, and keeps the
    holes: whole layers that come and go left 64 MiB there."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(tuple(shape))


def overlaps(locals_: Iterable[LocalTensor]) -> Iterator[tuple[LocalTensor, LocalTensor]]:
    """Pairs (first, second) with bytes in common, ``first`` earlier in ``locals_``. One pass in the order of addresses;
    empty tensors lie nowhere."""
    all_ = list(locals_)
    by_device: dict[torch.device, list[tuple[int, int]]] = {}
    for i, one in enumerate(all_):
        if one.tensor.numel():
            by_device.setdefault(one.tensor.device, []).append((one.tensor.data_ptr(), i))
    for ranges in by_device.values():
        reach, furthest = 0, -1  # the end of the tensor that reaches furthest so far, and its place
        for begin, i in sorted(ranges):
            end = begin + _extent(all_[i].tensor)
            if begin < reach:
                yield all_[min(furthest, i)], all_[max(furthest, i)]
            if end > reach:
                reach, furthest = end, i


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    ) * tensor.itemsize


def address_of(tensor: torch.Tensor) -> int:
    return 0 if oddity(tensor) else tensor.data_ptr()
