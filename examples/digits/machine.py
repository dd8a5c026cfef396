"""On what the figures of a report were measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def facts() -> dict[str, str]:
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": _memory(),
        "system": f"{platform.system()} {platform.machine()}",
    } | _versions()


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)


def _processor() -> str:
    return _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _memory() -> str:
    found = _field("/proc/meminfo", "MemTotal")
    return f"{int(found.split()[0]) / 2**20:.1f} GiB" if found else "unknown"


def _versions() -> dict[str, str]:
    import sklearn
    import torch

    import shardow

    return {
        "shardow": shardow.__version__,
        "torch": torch.__version__,
        "scikit-learn": sklearn.__version__,
        "python": platform.python_version(),
    }
