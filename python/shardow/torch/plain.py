"""Whole parameters: a plain model, or DDP, whose process group holds replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardow import _core, _errors
from shardow.torch.local import LocalTensor, Replicas, Slot


class PlainAdapter:
    """Claims everything that is left. ``group``: ranks that hold replicas, where the model itself doesn't say."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        ddp = next((module for module in model.modules() if isinstance(module, DistributedDataParallel)), None)
        self.group = ddp.process_group if ddp is not None else group
        self._replicas: Replicas = ()
        if self.group is not None and dist.get_world_size(self.group) > 1:
            self._replicas = ((self.group, dist.get_rank(self.group), dist.get_world_size(self.group)),)

    def claims(self, slot: Slot) -> bool:
        return True

    def local(self, slot: Slot) -> LocalTensor:
        tensor = slot.recorded
        region = _core.Region.whole(list(tensor.shape))
        return LocalTensor(slot.name, self.memory(slot), region, tensor.requires_grad, self._replicas, bool(self._replicas))

    def memory(self, slot: Slot) -> torch.Tensor:
        tensor = slot.recorded.detach()
        if not tensor.is_contiguous():
            raise _errors.make(
                "unsupported",
                f"'{slot.name}' of shape {tuple(tensor.shape)} is not contiguous (strides {tensor.stride()}); "
                "make it so before making an EMA: model.to(memory_format=torch.contiguous_format)",
            )
        return tensor

    def others(self) -> Sequence[LocalTensor]:
        return ()

    def reshard(self) -> None:
        pass
