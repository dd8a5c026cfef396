"""The environment that transformers and accelerate listen to while weights are loaded."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_VARIABLES = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
_lock = threading.Lock()
_inside = 0
_outermost = contextlib.ExitStack()


@contextlib.contextmanager
def fsdp_pretrained_load_context(enabled: bool) -> Iterator[None]:
    """transformers' from_pretrained() loads weights on rank 0 alone inside. It listens to variables of the environment,
    which are the process's: they are restored when the last of several blocks, in whatever threads, has ended."""
    global _inside
    if not enabled:
        yield
        return
    with _lock:
        if _inside == 0:
            _outermost.enter_context(unchanged_environment())
            os.environ.update(dict.fromkeys(_VARIABLES, "true"))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _outermost.close()


@contextlib.contextmanager
def unchanged_environment() -> Iterator[None]:
    """accelerate leaves its options in the environment, for transformers: every later from_pretrained() of a model that
    is not wrapped would be without weights on all ranks but the first."""
    before = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    try:
        yield
    finally:
        for name in _VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(before)
