"""FSDP2, HSDP, TP and their nestings: a parameter is a DTensor, and its placements say everything.

After a forward, FSDP2 may show unsharded parameters in place of the recorded ones, and its next forward may use that copy: writing shards then would leave the model on old weights. So every
FSDPModule is resharded before and after shards are written.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardow.torch.local import LocalTensor, Slot, plain_memory
from shardow.torch.regions import region_of, replicas_of


def sharded_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor of this rank's ``local``; without torch's planning of an operation, which takes milliseconds."""
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


class DTensorAdapter:
    def __init__(self, model: nn.Module, strided: bool) -> None:
        self._strided = strided
        self._modules: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def claims(self, slot: Slot) -> bool:
        return isinstance(slot.recorded, DTensor)

    def local(self, slot: Slot) -> LocalTensor:
        tensor: Any = slot.recorded
        return LocalTensor(slot.name, self.memory(slot), region_of(slot.name, tensor), tensor.requires_grad, replicas_of(tensor), True)

    def memory(self, slot: Slot) -> torch.Tensor:
        tensor: Any = slot.recorded
        return plain_memory(slot.name, tensor._local_tensor, self._strided)  # to_local() makes a new view, with a grad_fn, each time

    def others(self) -> Sequence[LocalTensor]:
        return ()

    def reshard(self) -> None:
        for module in self._modules:  # not recursive: the root alone is not enough
            module.reshard()

    def reset(self) -> None:
        """After a forward that raised, roots believe that it still runs, and ignore reshard(). Gradients that wait for their reduction are lost with it, as torch documents."""
        for module in self._modules:
            state = module._get_fsdp_state()  # private: nothing public tells a root, or that gradients wait
            if state._is_root and hasattr(module, "reset_iter_state"):
                if any(_awaits_reduction(group) for one in state._state_ctx.all_states for group in getattr(one, "_fsdp_param_groups", ())):
                    warnings.warn(
                        "a forward of this FSDP2 model raised while gradients were accumulating: what was not yet reduced is dropped; begin the accumulation again",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                module.reset_iter_state()
        self.reshard()


def _awaits_reduction(group: Any) -> bool:
    waiting = (getattr(p, "unsharded_accumulated_grad", None) for p in getattr(group, "fsdp_params", ()))
    return getattr(group, "_partial_reduce_output", None) is not None or any(grad is not None for grad in waiting)
