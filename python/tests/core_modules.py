"""Extension modules of the tests' own, in place of the shipped ``shardow._core``: linked from the same objects, with
more in them.

``HOOKS`` has ``shardow._core.hooks`` besides: functions that stop and count what the engine does (tests/hooks).
``FAKE`` has it too, and a CUDA device that only tests have; fake_device.py is its face.

A module is chosen before shardow is imported, so each runs in processes of its own.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ranks  # which imports torch, for seconds

_BUILD = Path(__file__).parents[2] / "build" / "release"


class CoreModule:
    """``folder``: of build/release, where the module lies."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._pool: ranks.Pool | None = None

    def install(self) -> None:
        """In a process that has not imported shardow yet."""
        assert "shardow" not in sys.modules, "shardow has its extension module already"
        path = next((_BUILD / self._folder).glob("_core*.so"), None)
        assert path is not None, f"no {_BUILD / self._folder}/_core*.so: make build"
        sys.meta_path.insert(0, _Finder(path))  # type: ignore[arg-type]

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

        return ranks.Pool(multiprocessing.get_context("spawn"), functools.partial(_serve, self._folder))


def _serve(folder: str, *args: Any) -> None:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # a warning of a timeout looks up names, for seconds
    CoreModule(folder).install()
    import ranks

    ranks._serve(*args)


def _body(module: str, name: str, values: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).body(**values)


class _Finder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def find_spec(self, name: str, *_: Any) -> Any:
        return importlib.util.spec_from_file_location(name, self._path) if name == "shardow._core" else None


HOOKS = CoreModule("hooks")
FAKE = CoreModule("fake")
