"""Modules and libraries that must be in a process before shardow is imported, so each has processes for itself.

``HOOKS``: an extension module in place of the shipped ``shardow._core``, linked from the same objects, which has
``shardow._core.hooks`` besides: functions that stop and count what the engine does (tests/hooks).
``FAKE``: the shipped module, and a CUDA driver and an NVRTC that only tests have; fake_device.py is its face.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ranks  # which imports torch, for seconds

_BUILD = Path(__file__).parents[2] / "build" / "release"


class CoreModule:
    """``patterns``: what lies in build/release, an extension module or a library that the engine opens by its name."""

    def __init__(self, *patterns: str) -> None:
        self._patterns = patterns
        self._pool: ranks.Pool | None = None

    def install(self) -> None:
        """In a process that has not imported shardow yet."""
        assert "shardow" not in sys.modules, "shardow has its extension module already"
        for pattern in self._patterns:
            path = next(_BUILD.glob(pattern), None)
            assert path is not None, f"no {_BUILD / pattern}: make build"
            if path.name.startswith("_core"):
                sys.meta_path.insert(0, _Finder(path))  # type: ignore[arg-type]
            else:
                ctypes.CDLL(str(path))

    def run(self, world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Calls ranks.run() with ranks that have this module."""
        if self._pool is None:
            self._pool = self._new_pool()
            atexit.register(self._pool.stop)
        return self._pool.run(world, fn, *args, timeout=timeout)

    def run_in_new_processes(self, world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        pool = self._new_pool()
        try:
            return pool.run(world, fn, *args, timeout=timeout)
        finally:
            pool.stop()

    def alone(self, fn: Callable[..., None]) -> Callable[..., None]:
        """Decorates a test whose body runs in one such process. Its fixtures have values that can be pickled."""

        @functools.wraps(fn)
        def test(**values: Any) -> None:
            self.run(1, _body, fn.__module__, fn.__name__, values)

        test.body = fn  # type: ignore[attr-defined]
        return test

    def _new_pool(self) -> ranks.Pool:
        import ranks

        return ranks.Pool(serve=functools.partial(_serve, self._patterns))


def _serve(patterns: tuple[str, ...], *args: Any) -> None:
    CoreModule(*patterns).install()
    import ranks

    ranks._serve(*args)


def _body(module: str, name: str, values: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).body(**values)


class _Finder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def find_spec(self, name: str, *_: Any) -> Any:
        return importlib.util.spec_from_file_location(name, self._path) if name == "shardow._core" else None


HOOKS = CoreModule("hooks/_core*.so")
FAKE = CoreModule("fake/libcuda.so.1", "fake/libnvrtc.so.12")
FAKE_AND_HOOKS = CoreModule("fake/libcuda.so.1", "hooks/_core*.so")
