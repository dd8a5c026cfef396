"""Shardow: the averaged (EMA) weights of models that train on many ranks; sharded, exact, resumable.

``shardow.EMA`` keeps the averages of a PyTorch model; ``shardow.schedules`` says how much of the old average survives
each step. Importing this package imports neither torch nor CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardow._core import Schedule
from shardow.base.checks import with_torch
from shardow.errors import Error

if TYPE_CHECKING:
    from shardow import compat, errors, memory, posthoc, schedules
    from shardow.averaging.attach import Handle
    from shardow.checkpoints.face import Checkpoints
    from shardow.ema import EMA
    from shardow.files.background import SaveHandle
    from shardow.files.checkpoint import async_save, full_state_dict, save
    from shardow.files.reading import Checkpoint, Slice, open_checkpoint
    from shardow.merging.face import merge, merged
    from shardow.start.materialize import load, materialize
    from shardow.start.meta import meta_init, to_empty
    from shardow.start.wrap import wrap

    open = open_checkpoint

__version__ = "0.1.0"
#: Without "open", which `import *` would put before Python's own.
__all__ = [
    "EMA", "Checkpoint", "Checkpoints", "Error", "Handle", "SaveHandle", "Schedule", "Slice", "__version__",
    "async_save", "compat", "errors", "full_state_dict", "load", "materialize", "memory", "merge", "merged",
    "meta_init", "posthoc", "save", "schedules", "to_empty", "wrap",
]  # fmt: skip
#: Where what is imported at its first use lives.
_HOMES = {
    "Handle": "averaging.attach", "Checkpoints": "checkpoints.face", "EMA": "ema", "SaveHandle": "files.background",
    "Checkpoint": "files.reading", "Slice": "files.reading", "async_save": "files.checkpoint",
    "full_state_dict": "files.checkpoint", "save": "files.checkpoint", "load": "start.materialize",
    "merge": "merging.face", "merged": "merging.face", "materialize": "start.materialize", "meta_init": "start.meta",
    "to_empty": "start.meta", "wrap": "start.wrap",
}  # fmt: skip

if not TYPE_CHECKING:  # type checkers would take any name then

    def __getattr__(name: str) -> Any:
        """What needs torch is imported where it is first used."""
        import importlib

        if name in ("compat", "errors", "memory", "posthoc", "schedules"):
            return importlib.import_module(f"shardow.{name}")
        if name == "open":
            return importlib.import_module("shardow.files.reading").open_checkpoint
        if name in _HOMES:
            with with_torch(f"shardow.{name}"):
                return getattr(importlib.import_module(f"shardow.{_HOMES[name]}"), name)
        raise AttributeError(f"module 'shardow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "open"])
