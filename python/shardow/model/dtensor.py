"""FSDP2, HSDP, TP and their nestings: a parameter is a DTensor, and its placements say everything. After a forward,
FSDP2 may show unsharded parameters in place of the recorded ones, and its next forward may use that copy: writing
shards then would leave the model on old weights. So every FSDPModule is resharded before and after shards are written;
of a part of a model, its parents too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardow.base.warnings import warn
from shardow.model.local import Form, LocalTensor, memory_of
from shardow.model.names import modules_of
from shardow.model.parents import fsdp2_around
from shardow.model.regions import region_of, replicas_of
from shardow.model.slots import Slot


def sharded_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor of this rank's ``local``; without torch's planning of an operation, which takes milliseconds."""
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


class DTensorAdapter:
    def __init__(self, model: nn.Module, form: Form) -> None:
        self._form: Form = form
        self._modules: list[Any] = [
            module for module in modules_of(model) if isinstance(module, FSDPModule)
        ] + fsdp2_around(model)

    def claims(self, slot: Slot) -> bool:
        return isinstance(slot.recorded, DTensor)

    def local(self, slot: Slot) -> LocalTensor:
        tensor: Any = slot.recorded
        return LocalTensor(
            slot.name, self.memory(slot), region_of(slot.name, tensor), tensor.requires_grad, replicas_of(tensor), True
        )

    def memory(self, slot: Slot) -> torch.Tensor:
        tensor: Any = slot.recorded
        # to_local() makes a new view, with a grad_fn, each time.
        return memory_of(slot.name, tensor._local_tensor, self._form)

    def reshard(self) -> None:
        for module in self._modules:  # not recursive: the root alone is not enough
            module.reshard()

    def unsharded(self) -> list[str]:
        """Parameters that are shown unsharded now."""
        return [
            f"{info.param_name} of {type(info.module).__name__}"
            for module in self._modules
            for group in _groups(module._get_fsdp_state())  # private: nothing public tells unsharded from never sharded
            for info, whole in ((p._module_info, getattr(p, "_unsharded_param", None)) for p in group.fsdp_params)
            if whole is not None and info.module._parameters.get(info.param_name) is whole
        ]

    def reset(self) -> None:
        """After a forward that raised, roots believe that it still runs, and ignore reshard(). Gradients that wait for
        their reduction are lost with it, as torch documents."""
        for module in self._modules:
            state = module._get_fsdp_state()  # private: nothing public tells a root, or that gradients wait
            if state._is_root and hasattr(module, "reset_iter_state"):
                if any(_awaits_reduction(group) for one in state._state_ctx.all_states for group in _groups(one)):
                    lost = "what was not yet reduced is dropped; begin the accumulation again"
                    warn(
                        f"a forward of this FSDP2 model raised while gradients were accumulating: {lost}",
                        RuntimeWarning,
                    )
                module.reset_iter_state()
        self.reshard()


def _groups(state: Any) -> list[Any]:
    """Before torch 2.12 there was one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [group for group in [state._fsdp_param_group] if group is not None]


def _awaits_reduction(group: Any) -> bool:
    waiting = (getattr(p, "unsharded_accumulated_grad", None) for p in getattr(group, "fsdp_params", ()))
    return getattr(group, "_partial_reduce_output", None) is not None or any(grad is not None for grad in waiting)
