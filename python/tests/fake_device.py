"""Weights on a CUDA device that only tests have: ranks that have build/release/fake/libcuda.so.1 for a driver.

``run(world, fn, *args)`` is ``ranks.run()`` with such ranks. In them ``Device`` says whose tensors lie on the device,
though torch has them on the CPU. The device copies when somebody waits for it, or has its stream do something: torch's
operations do, as they do on a device, before they read or write anything. So an update that is read too early is torn,
and what nothing orders happens late.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core_modules import FAKE
from torch.utils._python_dispatch import TorchDispatchMode

run = FAKE.run
on_device = FAKE.alone


class Driver:
    """The fake driver's own functions (tests/cuda/control.cc)."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        integer, long, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p

        def function(name: str, result: Any = None, **arguments: Any) -> Any:
            called = getattr(library, f"fake_{name}")
            called.restype, called.argtypes = result, list(arguments.values())
            return called

        self.reset = function("reset", num_devices=integer, seed=long)
        self.run = function("run", stream=pointer, device=integer)
        self.stream = function("stream", pointer, device=integer, number=integer)
        self.fail_allocation = function("fail_allocation", number=integer)
        self.allocated = function("allocated", long)
        self.copied_to_host = function("copied_to_host", long)
        self._fail_copy = function("fail_copy", number=integer, times=integer)

    def fail_copy(self, number: int = 0, times: int = 1) -> None:
        """The copy of this number from now fails (0: the next), and times - 1 after it; times=-1: all."""
        self._fail_copy(number, times)


class Device(TorchDispatchMode):
    """``with Device(seed) as device: device.hold(model)``: the model's tensors are on cuda:0, wherever they move.

    ``seed``: when and in which order what streams have to do is done; None: at once.
    ``stream``: the number of torch's current one; 0: the default one.
    """

    def __init__(self, seed: int | None = 0, num_devices: int = 1) -> None:
        super().__init__()
        self.fake = Driver()
        self.fake.reset(num_devices, -1 if seed is None else seed)
        self.stream = 0
        self._holders: list[tuple[Any, int]] = []  # (weak reference to what has tensors, index of the device)
        self._devices = range(num_devices)

    def hold_first(self, holder: torch.nn.Module | torch.Tensor, index: int) -> None:
        """On that device, whatever else holds it."""
        self._holders.insert(0, (weakref.ref(holder), index))

    def hold(self, holder: torch.nn.Module | torch.Tensor, index: int = 0) -> None:
        self._holders.append((weakref.ref(holder), index))

    def __enter__(self) -> Any:
        from shardow.sharding import storage

        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(storage, "device_of", self._device_of)
        self._patch.setattr(torch.cuda, "current_stream", self._current_stream)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for index in self._devices:
            self.fake.run(self._current_stream(index).cuda_stream, index)
        return func(*args, **(kwargs or {}))

    def _current_stream(self, device: torch.device | int) -> Any:
        index = device if isinstance(device, int) else device.index or 0
        return SimpleNamespace(cuda_stream=self.fake.stream(index, self.stream) if self.stream else 0)

    def _device_of(self, tensor: torch.Tensor) -> torch.device:
        memory = tensor.untyped_storage().data_ptr()
        for held, index in self._holders:
            if memory and any(memory == one for one in _memory(held())):
                return torch.device("cuda", index)
        return torch.device("cpu")


def _memory(holder: Any) -> Iterator[int]:
    tensors: Iterable[torch.Tensor] = ()
    if isinstance(holder, torch.Tensor):
        tensors = (holder,)
    elif holder is not None:
        tensors = (*holder.parameters(), *holder.buffers())
    for tensor in tensors:
        yield getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()
