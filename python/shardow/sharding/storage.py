"""Describes torch memory to the engine, and finds different tensors that lie in the same memory."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import torch

from shardow import _core
from shardow.sharding.local import LocalTensor, oddity


def _mark(tensor: torch.Tensor) -> int:
    """Returns the mark of a tensor of a subclass, which may give another address than its own. Its form is read without
    its __torch_function__, which would take four times as long."""
    address = tensor.data_ptr()
    with torch._C.DisableTorchFunctionSubclass():
        return hash((address, tensor.shape, tensor.stride(), tensor.dtype))


#: Describes how and where tensors lie; cheap enough to be called before every update.
MARKS = _core.Marks(torch.Tensor, torch.nn.Parameter, _mark)


def device_of(tensor: torch.Tensor) -> torch.device:
    """Returns the device of a tensor for the engine; tests replace this function on a machine without a device."""
    return tensor.device


@cache
def why_not(device: torch.device) -> str:
    """Returns why the engine's kernels don't serve a device; empty: they do."""
    if device.type == "cuda":
        return _core.cuda_refusal(device.index or 0)
    return "" if device.type == "cpu" else "the engine has kernels for CPUs and CUDA devices"


def engine_view(name: str, dtype: str, tensor: torch.Tensor, region: _core.Region) -> _core.TensorView:
    """Returns the engine's view of a contiguous tensor on the CPU or a CUDA device, where the engine's work is enqueued
    on torch's current stream.
    """
    device = device_of(tensor)
    if device.type == "cpu":
        return _core.TensorView(name, dtype, region, tensor.data_ptr())
    stream = torch.cuda.current_stream(device).cuda_stream
    return _core.TensorView(name, dtype, region, tensor.data_ptr(), "cuda", device.index or 0, stream)


def storage_key(tensor: torch.Tensor) -> int:
    """Returns an identity of a tensor's storage, on meta too."""
    return int(tensor.untyped_storage()._cdata)


def mapped(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a CPU tensor without values in a separate mapping, which returns to the system when the tensor dies.
    malloc() would raise its threshold to the last freed size, take the next large tensors from its heap, and keep the
    holes: whole layers that came and went left 64 MiB in these."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(tuple(shape))


def overlaps(locals_: Iterable[LocalTensor]) -> Iterator[tuple[LocalTensor, LocalTensor]]:
    """Yields pairs (first, second) with bytes in common, ``first`` earlier in ``locals_``, in one pass in the order of
    addresses. Empty tensors have no bytes."""
    all_ = list(locals_)
    by_device: dict[torch.device, list[tuple[int, int]]] = {}
    for i, local in enumerate(all_):
        if local.tensor.numel():
            by_device.setdefault(local.tensor.device, []).append((local.tensor.data_ptr(), i))
    for ranges in by_device.values():
        reach, furthest = 0, -1  # the end of the tensor that reaches furthest so far, and its place
        for begin, i in sorted(ranges):
            end = begin + _extent(all_[i].tensor)
            if begin < reach:
                yield all_[min(furthest, i)], all_[max(furthest, i)]
            if end > reach:
                reach, furthest = end, i


def _extent(tensor: torch.Tensor) -> int:
    """Returns the bytes from the first element to the end of the last one."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    ) * tensor.itemsize


def address_of(tensor: torch.Tensor) -> int:
    return 0 if oddity(tensor) else tensor.data_ptr()
