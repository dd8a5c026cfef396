"""load(): values from a file, for a module of any sharding, on meta or not, or for a mapping's tensors."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardow.base.checks import invalid
from shardow.base.progress import Progress
from shardow.files.checkpoint import prepared
from shardow.files.paths import StrPath
from shardow.model.parts import Saveable
from shardow.start.fill import Job, from_file
from shardow.start.materialize import Request, fill_model


@torch.no_grad()
def load(
    target: Saveable,
    path: StrPath,
    strict: bool = True,
    verify: bool = True,
    *,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
    timeout: float | timedelta | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Fills a module, or a mapping's tensors, from a file or a Hugging Face directory, whatever sharding saved it.

    A module that is on meta gets memory, as by materialize(). Collective over the ranks that share them.

    Each rank reads the bytes of its own regions, and casts floating tensors to the dtype here. Names are matched as they are, under a tied
    tensor's other names, and without what wrappers, DDP and PEFT put into them. Everything that does not fit is listed before anything
    changes.

    Args:
        strict: every tensor here is in the file, and every one there is wanted; else the rest is in the report.
        verify: compare checksums where the file carries them; no extra reads.
        optimizer: of a module, as in materialize().

    Returns:
        {"missing": [name], "unexpected": [name], "kept": [name; see materialize()], "metadata": {str: str}, "bytes_read": by this rank,
        "seconds": float}.

    Raises:
        ValueError: something does not fit, or the file is corrupt; FileNotFoundError, OSError, TimeoutError.
    """
    if isinstance(target, nn.Module):
        return fill_model(
            Request("load()", target, Path(path), optimizer, strict=strict, verify=verify, progress=progress, group=group, timeout=timeout)
        )
    if optimizer is not None:
        raise invalid("load(): optimizer= goes with a module; a mapping does not tell whose parameters its tensors are")
    held, team = prepared("load()", target, group, timeout, saving=False)
    report = from_file(Job("load()", held, team, [part.name for part in held.parts], (), strict, verify, progress), path)
    held.put_back()
    return report
