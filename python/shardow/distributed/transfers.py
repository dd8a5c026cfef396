"""Transfers of a process group, waited for as everything else is, to a deadline, or a signal; what torch tells of it in
private; and memory for what arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions
from torch.distributed.distributed_c10d import _get_default_timeout

from shardow import errors
from shardow.distributed.abandonable_thread import beyond, failure_of


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns a tensor without values, on ``device`` whatever torch's default device is, which may be written to
    outside inference mode, too."""
    with torch.inference_mode(False):
        return torch.empty(tuple(shape), dtype=dtype, device=device)


def begun(begin: Callable[[], dist.Work | None], otherwise: str) -> dist.Work | None:
    """A transfer; that it can't even begin, on a connection that is closed, is a typed error that begins with
    ``otherwise``.
    """
    try:
        return begin()
    except RuntimeError as error:
        raise _lost(error, otherwise) from None


def broadcast(tensor: torch.Tensor, root: int, group: dist.ProcessGroup, seconds: float) -> dist.Work:
    """torch's broadcast() of bytes from that rank of the group, without waiting."""
    options = BroadcastOptions()
    options.rootRank = root
    return group.broadcast([tensor.view(-1).view(torch.uint8)], until(options, tensor, seconds))


def until(options: Any, tensor: torch.Tensor, seconds: float) -> Any:
    """Returns ``options`` of a collective that is waited for later. Over gloo one that is cut off ends after
    ``seconds``: torch's thread would go on with it for the group's own timeout, and the process wait for that thread
    at its end."""
    options.asyncOp = True
    if tensor.is_cpu:
        options.timeout = timedelta(seconds=max(seconds, 0.001))
    return options


def finish(work: dist.Work | None, seconds: float, otherwise: str, timeout: float | None = None) -> None:
    """Waits for a transfer, until a signal at most; its failure is a typed error that begins with ``otherwise``. Past
    its deadline gloo closes the connection of the two ranks, for good. ``timeout``: what was asked for, of which
    ``seconds`` are left."""
    if work is None:
        return
    seconds = max(seconds, 0.001)
    failed = failure_of(lambda: work.wait(timedelta(seconds=seconds)), beyond(seconds))
    if isinstance(failed, (RuntimeError, TimeoutError)):
        raise _lost(failed, otherwise, timeout or seconds)
    if failed is not None:
        raise failed


def _lost(error: Exception, otherwise: str, timeout: float | None = None) -> Exception:
    if timeout is not None and "imed out" in str(error):
        return errors.make("timeout", f"{otherwise} within {timeout:g} s")
    return errors.make("peer_failed", f"{otherwise}: {error}")


def carrier(process_group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Where a tensor of ``device`` lies while the group moves it: there, or on the group's own device (NCCL moves none
    of the CPU).
    """
    if process_group is None:
        return device
    try:
        process_group._get_backend(device)
    except RuntimeError:
        types = sorted(device.type for device in process_group._device_types)
        return process_group.bound_device_id or torch.device("cpu" if "cpu" in types else types[0])
    return device


def default_timeout(process_group: dist.ProcessGroup | None) -> float:
    """Seconds: the process group's own."""
    if process_group is None:
        return 1800.0
    try:
        backend = process_group._get_backend(next(iter(process_group._device_types)))
        return float(backend.options._timeout.total_seconds())  # no public reader of a group's timeout exists
    except (AttributeError, RuntimeError, StopIteration):
        return float(_get_default_timeout(dist.get_backend(process_group)).total_seconds())
