"""FSDP2, HSDP, TP and their nestings: a parameter is a DTensor, and its placements say everything.

After a forward, FSDP2 may show unsharded parameters in place of the recorded ones, and its next forward may use that copy: writing shards then would leave the model on old weights. So every
FSDPModule is resharded before and after shards are written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardow.torch.local import LocalTensor, Slot
from shardow.torch.regions import region_of, replicas_of


class DTensorAdapter:
    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def claims(self, slot: Slot) -> bool:
        return isinstance(slot.recorded, DTensor)

    def local(self, slot: Slot) -> LocalTensor:
        tensor = slot.recorded
        return LocalTensor(slot.name, self.memory(slot), region_of(slot.name, tensor), tensor.requires_grad, replicas_of(tensor), True)

    def memory(self, slot: Slot) -> torch.Tensor:
        local: torch.Tensor = slot.recorded._local_tensor  # type: ignore[attr-defined]  # to_local() makes a new view, with a grad_fn, each time
        return local

    def others(self) -> Sequence[LocalTensor]:
        return ()

    def reshard(self) -> None:
        for module in self._modules:  # not recursive: the root alone is not enough
            module.reshard()

    def reset(self) -> None:
        """After a forward that raised, roots believe that it still runs, and ignore reshard(). Drops gradients that wait for their reduction."""
        for module in self._modules:
            if hasattr(module, "reset_iter_state") and module._get_fsdp_state()._is_root:
                module.reset_iter_state()
        self.reshard()
