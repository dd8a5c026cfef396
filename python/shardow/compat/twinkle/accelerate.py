"""AccelerateStrategy: twinkle's other strategy. accelerate shards and wraps; rank 0's weights come as in
shardow.wrap().
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from shardow.base.checks import invalid, unsupported, warn
from shardow.compat._impl.swapped_model_proxy import all_ranks
from shardow.compat.twinkle.helpers import unchanged_environment
from shardow.compat.twinkle.strategy import Strategy
from shardow.model import origins
from shardow.start.materialize import materialize
from shardow.start.wrap import own_weights, to_meta


class AccelerateStrategy(Strategy):
    """``device_mesh``: twinkle's or torch's, with dimensions named "dp" and "fsdp" ("tp", "cp", "sp"); None: no FSDP.
    ``ddp_config``: of accelerate's DistributedDataParallelKwargs. ``fsdp_config``: of its
    FullyShardedDataParallelPlugin, unchanged; ``fsdp_version`` is 2.

    ``memory_efficient_init``: rank 0's weights count, and the others may have none, as after from_pretrained() in
    pretrained_load_context(). ``accelerator`` is accelerate's own.

    Raises NotImplementedError where accelerate is not installed; ValueError for another ``fsdp_version``.
    """

    def __init__(
        self, device_mesh: Any = None, mixed_precision: str = "bf16", ddp_config: Mapping[str, Any] | None = None,
        fsdp_config: Mapping[str, Any] | None = None, memory_efficient_init: bool = False,
    ) -> None:  # fmt: skip
        try:
            from accelerate import Accelerator, DistributedDataParallelKwargs
            from accelerate.utils import InitProcessGroupKwargs
        except ImportError as error:
            raise unsupported(
                "AccelerateStrategy needs accelerate: pip install accelerate; NativeFSDPStrategy needs nothing"
            ) from error
        self.device_mesh, self.mixed_precision = device_mesh, mixed_precision
        self._memory_efficient_init = memory_efficient_init
        seconds = int(os.environ.get("TWINKLE_DIST_TIMEOUT_SECONDS", "7200"))
        handlers: list[Any] = [InitProcessGroupKwargs(timeout=timedelta(seconds=seconds))]
        if ddp_config is not None:
            handlers.append(DistributedDataParallelKwargs(**ddp_config))
        sizes = _sizes(device_mesh)
        with unchanged_environment():
            self.fsdp_plugin = _plugin(sizes, mixed_precision, dict(fsdp_config or {}), memory_efficient_init)
            self.accelerator = Accelerator(
                mixed_precision=mixed_precision,
                fsdp_plugin=self.fsdp_plugin,
                parallelism_config=_parallelism(sizes),
                kwargs_handlers=handlers,
            )
        if self.fsdp_plugin is not None and not self._shards():
            warn(
                f"accelerate does no FSDP here ({self.accelerator.distributed_type}, {self.accelerator.device}): "
                "models will be replicated; NativeFSDPStrategy shards on CPUs too",
                RuntimeWarning,
            )

    def wrap_model(self, model: nn.Module, *args: Any) -> Any:
        """``accelerator.prepare(model, *args)``, with its result: (model, optimizer, ...), FSDP2's at once.
        Collective."""
        if not (self._memory_efficient_init and self._shards()):
            return self.accelerator.prepare(model, *args)
        ranks = all_ranks()
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]

        def ready() -> tuple[list[origins.Bindings], Mapping[str, torch.Tensor] | None]:
            origins.remember_all(model)
            return [origins.bindings(one, model) for one in optimizers], own_weights(model) if ranks.rank == 0 else None

        bindings, own = ranks.agree("wrap_model()", ready)
        to_meta(model)
        for optimizer, places in zip(optimizers, bindings, strict=True):
            origins.bind(optimizer, places)  # it would keep the whole model
        plugin = self.accelerator.state.fsdp_plugin
        # accelerate's own loading sends everything to every rank, and fails for persistent buffers.
        before, plugin.cpu_ram_efficient_loading = plugin.cpu_ram_efficient_loading, False
        try:
            prepared = self.accelerator.prepare(model, *args)
        finally:
            plugin.cpu_ram_efficient_loading = before
        materialize(model, own)
        for optimizer, places in zip(optimizers, bindings, strict=True):
            # accelerate identifies parameters by their addresses, and on meta they have none.
            origins.bind(optimizer, places)
        return prepared

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return self.accelerator.unwrap_model(model, keep_torch_compile=False)  # type: ignore[no-any-return]

    def needs_wrapped_optimizer_state(self) -> bool:
        return self._shards()

    def _shards(self) -> bool:
        return bool(self.accelerator.is_fsdp2)


def _sizes(mesh: Any) -> dict[str, int]:
    """Of a mesh's dimensions, by name."""
    names = None if mesh is None else getattr(mesh, "mesh_dim_names", None)
    return dict(zip(names, torch.as_tensor(mesh.mesh, device="cpu").shape, strict=True)) if names else {}


def _parallelism(sizes: Mapping[str, int]) -> Any:
    """accelerate's ParallelismConfig where FSDP alone, or DDP alone, is not what the mesh says."""
    from accelerate import ParallelismConfig

    dp, fsdp, tp, cp, sp = (sizes.get(name, 1) for name in ("dp", "fsdp", "tp", "cp", "sp"))
    if (dp == 1 or fsdp == 1) and tp == cp == sp == 1:
        return None
    return ParallelismConfig(dp_replicate_size=dp, dp_shard_size=fsdp, tp_size=tp, cp_size=cp, sp_size=sp)


def _plugin(sizes: Mapping[str, int], mixed_precision: str, config: dict[str, Any], memory_efficient: bool) -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    # The upstream reads the second key, where it does not look for a version.
    version = config.pop("fsdp_version", config.pop("fsdp_config", 2))
    if version != 2:
        raise invalid(f"fsdp_config={{'fsdp_version': {version!r}}}; it must be 2")
    if sizes.get("fsdp", 1) == 1:
        return None
    defaults: dict[str, Any] = {
        "mixed_precision_policy": None if mixed_precision == "no" else mixed_precision,
        "auto_wrap_policy": "transformer_based_wrap", "reshard_after_forward": True, "cpu_offload": False,
        "activation_checkpointing": False, "cpu_ram_efficient_loading": memory_efficient,
    }  # fmt: skip
    return FullyShardedDataParallelPlugin(fsdp_version=2, **{**defaults, **config})
