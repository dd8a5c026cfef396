"""A model's tensors without values: in memory that nobody has written, or on meta, where there is none. The one way to
make them.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardow.model.dtensor import sharded_like


def empty_like(tensor: torch.Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Of the same shape and kind: a DTensor sharded alike; a Parameter with the attributes that its makers gave it."""
    if isinstance(tensor, DTensor):
        return sharded_like(tensor, empty_like(tensor._local_tensor, device, dtype))
    empty = torch.empty_like(tensor, device=device, dtype=dtype, requires_grad=False)
    if not isinstance(tensor, nn.Parameter):
        return empty
    made = type(tensor)(empty, requires_grad=tensor.requires_grad)
    vars(made).update({key: value for key, value in vars(tensor).items() if not key.startswith("_")})
    return made
