"""Whole parameters: a plain model, or DDP, whose process group holds replicas."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardow import _core
from shardow.model.local import Adapter, LocalTensor, Replicas, replicas_in
from shardow.model.slots import Slot


class PlainAdapter(Adapter):
    """Claims everything that is left. ``group``: ranks that hold replicas of whatever no DDP module in the tree has.
    Only parameters are replicas. Buffers differ between DDP's ranks, since batch statistics are each rank's own:
    dividing them, or handing out another's, would mix ranks."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._replicas: dict[int, Replicas] = {}
        if group is not None:
            self._replicas = dict.fromkeys(map(id, model.parameters()), replicas_in(group))
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                kept_equal = (
                    p for name, p in module.module.named_parameters() if name not in module.parameters_to_ignore
                )
                self._replicas.update(dict.fromkeys(map(id, kept_equal), replicas_in(module.process_group)))

    def claims(self, slot: Slot) -> bool:
        return True

    def local(self, slot: Slot) -> LocalTensor:
        tensor, replicas = slot.recorded, self._replicas.get(id(slot.recorded), ())
        region = _core.Region.whole([] if tensor.is_nested else list(tensor.shape))
        return LocalTensor(slot.name, tensor.detach(), region, tensor.requires_grad, replicas, bool(replicas))
