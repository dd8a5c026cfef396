"""Memory that Shardow makes for itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns a tensor without values, on ``device`` whatever torch's default device is, which may be written to
    outside inference mode, too."""
    with torch.inference_mode(False):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
