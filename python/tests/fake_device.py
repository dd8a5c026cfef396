"""Weights on a CUDA device that only tests have: ranks whose shardow has build/release/fake/_core for its engine.

``run(world, fn, *args)`` is ``ranks.run()`` with such ranks. In them ``Device`` says whose tensors lie on the device,
though torch has them on the CPU. The device copies when somebody waits for it, or has its stream do something: torch's
operations do, as they do on a device, before they read or write anything. So an update that is read too early is torn,
and what nothing orders happens late.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import multiprocessing
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_BUILT = "build/release/fake/_core*.so"

_pool: ranks.Pool | None = None


def run(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    global _pool
    if _pool is None:
        _pool = ranks.Pool(multiprocessing.get_context("spawn"), _serve)
        atexit.register(_pool.stop)
    return _pool.run(world, fn, *args, timeout=timeout)


def on_device(fn: Callable[..., None]) -> Callable[..., None]:
    """A test whose body runs in such a process, alone."""

    @functools.wraps(fn)
    def test(**given: Any) -> None:
        run(1, _body, fn.__module__, fn.__name__, given)

    test.body = fn  # type: ignore[attr-defined]
    return test


def _body(module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).body(**given)


def _serve(*args: Any) -> None:
    install()
    ranks._serve(*args)


def install() -> None:
    """In a process that has not imported shardow yet."""
    assert "shardow" not in sys.modules
    assert _Finder.module is not None, f"no {_BUILT}: make build"
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]


class _Finder:
    module = next(Path(__file__).parents[2].glob(_BUILT), None)

    @classmethod
    def find_spec(cls, name: str, *_: Any) -> Any:
        return importlib.util.spec_from_file_location(name, cls.module) if name == "shardow._core" else None


class Device(TorchDispatchMode):
    """``with Device(seed) as device: device.hold(model)``: the model's tensors are on cuda:0, wherever they move.

    ``seed``: when and in which order what streams have to do is done; None: at once. ``stream``: torch's current one.
    """

    def __init__(self, seed: int | None = 0, num_devices: int = 1) -> None:
        super().__init__()
        from shardow import _core

        self.fake: Any = _core.fake  # type: ignore[attr-defined]
        self.fake.reset(num_devices, seed)
        self.stream = 0
        self._holders: list[tuple[Any, int]] = []  # (weak reference to what has tensors, index of the device)
        self._devices = range(num_devices)

    def hold_first(self, holder: torch.nn.Module | torch.Tensor, index: int) -> None:
        """On that device, whatever else holds it."""
        self._holders.insert(0, (weakref.ref(holder), index))

    def hold(self, holder: torch.nn.Module | torch.Tensor, index: int = 0) -> None:
        self._holders.append((weakref.ref(holder), index))

    def __enter__(self) -> Any:
        from shardow.model import storage

        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(storage, "device_of", self._device_of)
        self._patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=self.stream))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for index in self._devices:
            self.fake.run(self.stream, index)
        return func(*args, **(kwargs or {}))

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
