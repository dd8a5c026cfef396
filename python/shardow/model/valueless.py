"""Models without values: on meta, or waiting for their first batch. There is nothing to average or to write in them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardow import errors
from shardow.model.local import slots_of
from shardow.model.names import walk


def refuse_valueless(model: nn.Module) -> None:
    tensors: list[tuple[str, torch.Tensor]] = [
        (slot.name, slot.recorded)
        for name, module in walk(model)
        for slot in [*slots_of(name, module._parameters), *slots_of(name, module._buffers)]
    ]
    for what, names in (
        ("not initialised yet", [name for name, tensor in tensors if is_lazy(tensor)]),
        ("on meta, without values", [name for name, tensor in tensors if not is_lazy(tensor) and tensor.is_meta]),
    ):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise errors.make("invalid_argument", f"{what}: {', '.join(names[:8])}{more}; give the model its weights before making an EMA")
