"""modelscope/twinkle's FSDP2 strategy and its helpers for memory-efficient initialisation (its PR 117), on shardow.wrap() and materialize().

Signatures and results are the origin's. Better: a rank is sent its own slices and nothing else, persistent buffers and plain tensors are filled, every name of a buffer is restored, optimizers keep their groups, and an error
comes on every rank. Different: ``get_full_state_dict()`` gives rank 0 the whole, with buffers and tied names, and the others {}; expert parallelism is left to the model's own sharding.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardow.base.checks import invalid, unsupported
from shardow.compat._accelerate import AccelerateStrategy
from shardow.compat._pretrained import fsdp_pretrained_load_context
from shardow.compat._strategy import Strategy
from shardow.model import origins
from shardow.start.materialize import materialize
from shardow.start.wrap import wrap

_unbound: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[list[_Left]]] = weakref.WeakKeyDictionary()


class NativeFSDPStrategy(Strategy):
    """``device_mesh``: twinkle's or torch's; None: nothing is wrapped. ``fsdp_config``: ``{"reshard_after_forward": bool}``, which is not changed."""

    def __init__(
        self,
        device_mesh: Any = None,
        mixed_precision: str = "bf16",
        fsdp_config: Mapping[str, Any] | None = None,
        memory_efficient_init: bool = False,
        enable_ep: bool = True,
        ep_size: int | None = None,
    ) -> None:
        self.device_mesh = device_mesh
        self.mixed_precision = mixed_precision
        self.fsdp_config = dict(fsdp_config or {})
        self.enable_ep = enable_ep
        self._memory_efficient_init = memory_efficient_init
        if enable_ep and (ep_size or getattr(device_mesh, "ep_size", None) or 1) > 1:
            raise unsupported(
                "expert parallelism is not applied here: shard the experts on their own mesh first, which wrap_model() leaves as they are"
            )

    def pretrained_load_context(self) -> contextlib.AbstractContextManager[None]:
        return fsdp_pretrained_load_context(self._memory_efficient_init and self.device_mesh is not None)

    def wrap_model(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        """fully_shard() on every decoder layer (``model.model.layers``) and on the model. With memory_efficient_init rank 0's weights count, and the others may have none."""
        mesh = _mesh_of(self.device_mesh)
        if mesh is None:
            return model, optimizer
        return wrap(
            model,
            mesh,
            optimizer,
            units=_is_one_of(_decoder_layers(model)),
            memory_efficient_init=self._memory_efficient_init,
            reshard_after_forward=self.fsdp_config.get("reshard_after_forward", True),
            mixed_precision=_policy(self.mixed_precision),
        )

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model

    def needs_wrapped_optimizer_state(self) -> bool:
        return self.device_mesh is not None


def _is_one_of(layers: list[nn.Module]) -> Any:
    """Units of wrap(): none are the model alone."""
    chosen = {id(layer) for layer in layers}
    return (lambda name, module: id(module) in chosen) if chosen else ()


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    layers = getattr(getattr(model, "model", None), "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) else []


def _mesh_of(mesh: Any) -> DeviceMesh | None:
    """All its ranks in one dimension; None where that is one rank."""
    if mesh is None or getattr(mesh, "mesh_dim_names", None) is None:
        return None
    flat = torch.as_tensor(mesh.mesh).flatten()
    return DeviceMesh(mesh.device_type or "cuda", flat, mesh_dim_names=("fsdp",)) if flat.numel() > 1 else None


def _policy(mixed_precision: str) -> MixedPrecisionPolicy:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision)
    return (
        MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype, cast_forward_inputs=True)
        if dtype
        else MixedPrecisionPolicy()
    )


def _broadcast_sharded_state_dict(model: nn.Module, full_sd: Mapping[str, torch.Tensor], device_type: str = "cuda") -> None:
    """Rank 0's ``full_sd`` into the model's shards; the others give {}. A model on meta gets memory on ``device_type``."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    materialize(model, full_sd if first else None, device=device_type)


def _get_non_persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """By every name that a buffer has."""
    return {
        f"{prefix}.{key}" if prefix else key: buffer.clone()
        for prefix, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key in module._non_persistent_buffers_set
    }


def _restore_non_persistent_buffers(model: nn.Module, saved_buffers: Mapping[str, torch.Tensor], device: torch.device | str) -> None:
    for name, saved in saved_buffers.items():
        prefix, _, key = name.rpartition(".")
        model.get_submodule(prefix).register_buffer(key, saved.to(device), persistent=False)


@dataclass(frozen=True)
class _Left:
    """What an unbound parameter has left: its module and key, and the optimizer's state of it."""

    place: tuple[nn.Module, str] | None
    state: dict[str, Any] | None


def _unbind_optimizer_params(optimizer: torch.optim.Optimizer) -> None:
    """Lets the parameters' memory go; where they were is remembered, as far as it is known, and what the optimizer knows of them."""
    _unbound[optimizer] = [
        [_Left(origins.of(param), optimizer.state.pop(param, None)) for param in group["params"]] for group in optimizer.param_groups
    ]
    for group in optimizer.param_groups:
        group["params"] = [torch.empty(1, dtype=param.dtype, device="meta") for param in group["params"]]


def _rebind_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The model's parameters into the optimizer's groups: where they were, else by ``param_names``, else, with one group, in the model's order; raises where none of them tells."""
    named = dict(model.named_parameters(remove_duplicate=False))
    known = _unbound.get(optimizer) or [
        [_Left(None, optimizer.state.get(param)) for param in group["params"]] for group in optimizer.param_groups
    ]
    trainable = [param for param in model.parameters() if param.requires_grad]
    groups: list[list[torch.Tensor]] = []
    for number, (group, places) in enumerate(zip(optimizer.param_groups, known, strict=True)):
        names = group.get("param_names") or [None] * len(places)
        found: list[torch.Tensor | None] = [
            left.place[0]._parameters.get(left.place[1]) if left.place else named.get(name)
            for left, name in zip(places, names, strict=True)
        ]
        if any(param is None for param in found) and len(known) == 1:
            everything = list(model.parameters())
            found = [*(everything if len(everything) == len(found) else trainable)]
        groups.append([param for param in found if param is not None])
        if len(groups[-1]) != len(places):
            raise invalid(
                f"optimizer group {number}: it is not known which of the model's parameters it had; make it from model.named_parameters()"
            )
    for group, params, left in zip(optimizer.param_groups, groups, known, strict=True):
        group["params"] = params
        optimizer.state.update(
            {param: origins.state_for(param, one.state) for param, one in zip(params, left, strict=True) if one.state is not None}
        )
    _unbound.pop(optimizer, None)
    return optimizer


__all__ = ["AccelerateStrategy", "NativeFSDPStrategy", "fsdp_pretrained_load_context"]
