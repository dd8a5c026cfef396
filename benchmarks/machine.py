"""Where figures come from."""

from __future__ import annotations

import os
import platform
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

from shardow import _core


def facts() -> list[tuple[str, str]]:
    return [
        ("date", date.today().isoformat()),
        ("command", "python -m benchmarks " + " ".join(sys.argv[1:])),
        ("processor", f"{_model()}, {os.cpu_count()} cores, last cache {_last_cache()}"),
        ("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"),
        ("instruction set in use", _core.hooks.simd_target()),
        ("system", f"{platform.system()}, Python {platform.python_version()}"),
        (
            "versions",
            ", ".join(f"{name} {version(name)}" for name in ("torch", "timm", "diffusers", "ema-pytorch", "torch-ema")),
        ),
    ]


def _model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _last_cache() -> str:
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return sizes[-1].read_text().strip() if sizes else "unknown"
