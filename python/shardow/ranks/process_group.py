"""What torch tells in private of a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_timeout


def has_cpu(process_group: dist.ProcessGroup) -> bool:
    """Whether it moves tensors of the CPU."""
    try:
        process_group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def default_timeout(process_group: dist.ProcessGroup | None) -> float:
    """Seconds: the process group's own."""
    if process_group is None:
        return 1800.0
    try:
        options = process_group._get_backend(
            next(iter(process_group._device_types))
        ).options  # no public reader of a group's timeout exists
        return float(options._timeout.total_seconds())
    except (AttributeError, RuntimeError, StopIteration):
        return float(_get_default_timeout(dist.get_backend(process_group)).total_seconds())
