"""Models without values: on meta, or waiting for their first batch. There is nothing to average or to write in them."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from shardow.base.checks import invalid
from shardow.model.slots import slots


def refuse_valueless(model: nn.Module) -> None:
    tensors = [(slot.name, slot.recorded) for slot in slots(model)]
    for what, names in (
        ("not initialised yet", [name for name, tensor in tensors if is_lazy(tensor)]),
        ("on meta, without values", [name for name, tensor in tensors if not is_lazy(tensor) and tensor.is_meta]),
    ):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise invalid(f"{what}: {', '.join(names[:8])}{more}; give the model its weights before making an EMA")
