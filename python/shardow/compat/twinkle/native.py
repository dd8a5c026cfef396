"""NativeFSDPStrategy: twinkle's own strategy, on shardow.wrap()."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardow.base.checks import unsupported
from shardow.compat.twinkle.strategy import Strategy
from shardow.start.wrap import wrap


class NativeFSDPStrategy(Strategy):
    """``device_mesh``: twinkle's or torch's; None: nothing is wrapped. ``fsdp_config``: ``{"reshard_after_forward":
    bool}``.
    """

    def __init__(
        self, device_mesh: Any = None, mixed_precision: str = "bf16", fsdp_config: Mapping[str, Any] | None = None,
        memory_efficient_init: bool = False, enable_ep: bool = True, ep_size: int | None = None,
    ) -> None:  # fmt: skip
        self.device_mesh = device_mesh
        self.mixed_precision = mixed_precision
        self.fsdp_config = dict(fsdp_config or {})
        self.enable_ep = enable_ep
        self._memory_efficient_init = memory_efficient_init
        if enable_ep and (ep_size or getattr(device_mesh, "ep_size", None) or 1) > 1:
            raise unsupported(
                "expert parallelism is not applied here: shard the experts first, which wrap_model() leaves as they are"
            )

    def use_rank0_pretrained_broadcast(self) -> bool:
        """True where ranks but the first may build the model on meta, as twinkle's own do: wrap_model() sends them rank
        0's weights.
        """
        return self._loads_on_rank_0()

    def wrap_model(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        """fully_shard() on decoder layers (``model.model.layers``) and on the model. With memory_efficient_init rank
        0's weights count.
        """
        mesh = _mesh_of(self.device_mesh)
        if mesh is None:
            return model, optimizer
        options: dict[str, Any] = {
            "memory_efficient_init": self._memory_efficient_init,
            "reshard_after_forward": self.fsdp_config.get("reshard_after_forward", True),
            "mixed_precision": _policy(self.mixed_precision),
        }
        return wrap(model, mesh, optimizer, _units(model), **options)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model

    def needs_wrapped_optimizer_state(self) -> bool:
        return self.device_mesh is not None


def _units(model: nn.Module) -> Any:
    """Decoder layers, as wrap() takes units: none are the model alone."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    chosen = set(map(id, layers)) if isinstance(layers, nn.ModuleList) else set()
    return (lambda name, module: id(module) in chosen) if chosen else ()


def _mesh_of(mesh: Any) -> DeviceMesh | None:
    """All its ranks in one dimension; None where that is one rank."""
    if mesh is None or getattr(mesh, "mesh_dim_names", None) is None:
        return None
    flat = torch.as_tensor(mesh.mesh, device="cpu").flatten()
    return DeviceMesh(mesh.device_type or "cuda", flat, mesh_dim_names=("fsdp",)) if flat.numel() > 1 else None


def _policy(mixed_precision: str) -> MixedPrecisionPolicy:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype, cast_forward_inputs=True)
