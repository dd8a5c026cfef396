"""On what the figures of a report were measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def facts() -> dict[str, str]:
    import sklearn
    import torch

    import shardow

    memory = _field("/proc/meminfo", "MemTotal")
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{int(memory.split()[0]) / 2**20:.1f} GiB" if memory else "unknown",
        "system": f"{platform.system()} {platform.machine()}",
        "shardow": shardow.__version__,
        "torch": torch.__version__,
        "scikit-learn": sklearn.__version__,
        "python": platform.python_version(),
    }


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)
