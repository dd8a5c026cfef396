"""NativeFSDPStrategy: twinkle's own strategy, on shardow.wrap()."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardow.base.checks import unsupported, warn
from shardow.compat.twinkle.strategy import Strategy
from shardow.model.modules import repeated_blocks
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
            raise unsupported("expert parallelism is not applied by wrap_model(): shard the experts first")

    def use_rank0_pretrained_broadcast(self) -> bool:
        """True where ranks but the first may build the model on meta, as twinkle's own do: wrap_model() sends them rank
        0's weights.
        """
        return self._loads_on_rank_0()

    def wrap_model(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        """fully_shard() on the layers (``_no_split_modules`` of any module, else ``model.model.layers``, else those
        of wrap()) and on the model. With memory_efficient_init rank 0's weights count. Warns without layers.
        """
        mesh = _mesh_of(self.device_mesh)
        if mesh is None:
            return model, optimizer
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.mixed_precision)
        options: dict[str, Any] = {
            "memory_efficient_init": self._memory_efficient_init,
            "reshard_after_forward": self.fsdp_config.get("reshard_after_forward", True),
            "mixed_precision": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype),
        }
        return wrap(model, mesh, optimizer, _units(model), **options)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model

    def needs_wrapped_optimizer_state(self) -> bool:
        return self.device_mesh is not None


def _units(model: nn.Module) -> Any:
    """Chooses units as wrap() takes them: modules of the classes that some module lists as ``_no_split_modules``, else
    ``model.model.layers``, else wrap()'s own. A module that shares a weight with others is no unit.
    """
    named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    layers = getattr(getattr(model, "model", None), "layers", None)
    uses = _uses(model)
    chosen = [
        module
        for module in model.modules()
        if named.intersection(cls.__name__ for cls in type(module).__mro__)
        and all(uses[weight] == number for weight, number in _uses(module).items())
    ] or (list(layers) if isinstance(layers, nn.ModuleList) else repeated_blocks(model))
    if not chosen:
        warn(f"{type(model).__name__} has no layers that are known, and is one unit: its weights are gathered at once")
        return ()
    return lambda name, module: any(module is unit for unit in chosen)


def _uses(model: nn.Module) -> Counter[int]:
    """Returns how many places of ``model`` each parameter has, by its id."""
    return Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))


def _mesh_of(mesh: Any) -> DeviceMesh | None:
    """All its ranks in one dimension; None where that is one rank."""
    if mesh is None or getattr(mesh, "mesh_dim_names", None) is None:
        return None
    flat = torch.as_tensor(mesh.mesh, device="cpu").flatten()
    return DeviceMesh(mesh.device_type or "cuda", flat, mesh_dim_names=("fsdp",)) if flat.numel() > 1 else None
