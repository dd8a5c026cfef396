"""The torch device "shim" (shim.cc): `import shim` once a process, before it uses the device; the whole process has it
then. Compiled at the first import, in a quarter of a minute, and kept in build/shim.

Nothing is to be timed on it, since a tiny operation takes 25 us; it has one stream, so wrong orders of streams don't
show.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("shim.cc")
DEVICES = 2


def library() -> Path:
    """Returns the compiled library. Locked by the kernel: who is killed in it leaves nothing to wait for."""
    folder = Path(__file__).parents[3] / "build" / "shim"
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    made, root = folder / f"shim-{key}.so", Path(torch.__file__).parent
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            compiler = [*filter(None, [os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER")]), "g++"]
            headers = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
            options = [
                "-fPIC",
                "-std=c++20",
                "-O0",
                "-w",
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            ]
            part, ready = made.with_suffix(".o"), made.with_suffix(".part")
            subprocess.run([*compiler, "-c", SOURCE, "-o", part, *options, *headers], check=True)
            libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
            subprocess.run(["g++", "-shared", part, "-o", ready, *libraries], check=True)
            ready.rename(made)
    return made


def _quietly(call: Callable[[], object]) -> None:
    """torch tells stderr, from C++, that c10d's kernels for this device are others now."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        call()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def counts() -> dict[str, int]:
    """Returns how often each operation ran since the last call."""
    return {name: int(count) for name, count in (line.rsplit(" ", 1) for line in torch.ops.shim.counts())}


def _here() -> torch.device:
    return torch.device("shim", torch.accelerator.current_device_index())


def _index(device: Any) -> int:
    return device if isinstance(device, int) else torch.device(device).index


_quietly(lambda: torch.ops.load_library(str(library())))
_module: Any = types.ModuleType("torch.shim")
_state = torch.zeros(16, dtype=torch.uint8)  # in the form that DTensor wants; numbers are drawn by the CPU's generator
_module.is_available = _module.is_initialized = lambda: True
_module._is_in_bad_fork = lambda: False
_module._lazy_init = lambda: None
_module.device_count = lambda: DEVICES
_module.current_device = torch.accelerator.current_device_index
_module.set_device = lambda device: torch.accelerator.set_device_index(_index(device))
_module.device = lambda device: torch.accelerator.device_index(_index(device))
_module.synchronize = lambda device=None: torch.accelerator.synchronize(device or _here())
_module.Stream = lambda device=None, priority=0, **_: torch.Stream(device or _here(), priority=priority)
_module.Event = lambda enable_timing=False, **_: torch.Event("shim", enable_timing=enable_timing)
_module.current_stream = lambda device=None: torch.accelerator.current_stream(device or _here())
_module.stream = lambda stream: stream or contextlib.nullcontext()
_module.manual_seed = _module.manual_seed_all = lambda seed: None
_module.get_rng_state = lambda device=None: _state.clone()
_module.set_rng_state = lambda state, device=None: _state.copy_(state)
_module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
torch.utils.rename_privateuse1_backend("shim")
torch._register_device_module("shim", _module)
torch.utils.generate_methods_for_privateuse1_backend()
