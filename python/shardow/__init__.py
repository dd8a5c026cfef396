"""Shardow: the averaged (EMA) weights of models that train on many ranks; sharded, exact, resumable.

``shardow.EMA`` keeps the averages of a PyTorch model; ``shardow.schedules`` says how much of the old average survives each step. Importing this package imports neither torch nor CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardow._core import Schedule
from shardow._errors import Error

if TYPE_CHECKING:
    from shardow import memory, schedules
    from shardow.checkpoint import async_save, load, save
    from shardow.ema import EMA
    from shardow.materializing import materialize
    from shardow.meta import meta_init, to_empty
    from shardow.reading import open_checkpoint as open  # noqa: F401
    from shardow.sharding import wrap

__version__ = "0.1.0"
__all__ = [
    "EMA",
    "Error",
    "Schedule",
    "__version__",
    "async_save",
    "load",
    "materialize",
    "memory",
    "meta_init",
    "save",
    "schedules",
    "to_empty",
    "wrap",
]  # not "open", which `import *` would put before Python's own
_NEEDS_TORCH = {
    "EMA": "shardow.ema",
    "materialize": "shardow.materializing",
    "meta_init": "shardow.meta",
    "to_empty": "shardow.meta",
    "async_save": "shardow.checkpoint",
    "load": "shardow.checkpoint",
    "save": "shardow.checkpoint",
    "wrap": "shardow.sharding",
}


def __getattr__(name: str) -> Any:
    """What needs torch is imported where it is first used."""
    import importlib

    if name in ("memory", "schedules"):
        return importlib.import_module(f"shardow.{name}")
    if name == "open":
        return importlib.import_module("shardow.reading").open_checkpoint
    if name in _NEEDS_TORCH:
        try:
            return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
        except ModuleNotFoundError as error:
            if error.name == "torch":
                raise ImportError(f"shardow.{name} needs PyTorch: pip install torch (2.6 or later)") from None
            raise
    raise AttributeError(f"module 'shardow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "open"])
