"""modelscope/twinkle's two FSDP2 strategies and its helpers for memory-efficient starts (its PR 117), on
shardow.wrap() and materialize(). Signatures and results are upstream's, but ``get_full_state_dict()`` gives rank 0
the whole, with buffers and tied names, and the others {}; experts are left to the model's own sharding."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardow.base.checks import invalid, unsupported, warn
from shardow.compat._impl import files
from shardow.compat._impl.swapped_model_proxy import all_ranks, ranks_of
from shardow.distributed.gather import Gatherer
from shardow.distributed.rank_group import RankGroup
from shardow.files.checkpoint import full_state_dict
from shardow.merging import foreign
from shardow.sharding.local_state import held_by
from shardow.sharding.match import fit
from shardow.sharding.modules import repeated_blocks
from shardow.sharding.parameter_registry import Bindings, bind, bindings, remember_all
from shardow.sharding.slots import slots_of
from shardow.sharding.swap_guard import refuse_foreign
from shardow.start.materialize import Request, materialize
from shardow.start.wrap import own_weights, to_meta, wrap

__all__ = ["AccelerateStrategy", "NativeFSDPStrategy", "fsdp_pretrained_load_context"]

_LORA = ("lora_A", "lora_B", "lora_embedding")
# Variables of the environment that transformers and accelerate read while weights are loaded.
_VARIABLES = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")


class Strategy:
    """Base of both strategies: whole states, adapters and the optimizer's checkpoint, with one model on many ranks."""

    device_mesh: Any
    _memory_efficient_init: bool

    def pretrained_load_context(self) -> AbstractContextManager[None]:
        """Returns a context in which from_pretrained() loads weights on rank 0 alone, if ``memory_efficient_init``."""
        return fsdp_pretrained_load_context(self._loads_on_rank_0())

    def _loads_on_rank_0(self) -> bool:
        return self._memory_efficient_init and self.device_mesh is not None

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Returns the model without what wrap_model() put around it."""
        return model

    def needs_wrapped_optimizer_state(self) -> bool:
        """Returns True where the optimizer's state can only be saved and loaded after wrap_model()."""
        return self.device_mesh is not None

    # ---- expert parallelism, which is the model's own business here

    def capture_pre_ep_state_if_needed(self, model: nn.Module, *, enable_ep: bool) -> None:
        """Does nothing: experts are sharded before wrap_model(), which leaves them as they are."""
        return

    def prepare_adapter_config(self, config_or_dir: Any, *, enable_ep: bool) -> Any:
        """Returns ``config_or_dir`` as it is."""
        return config_or_dir

    def get_ep_clip_kwargs(self, model: nn.Module) -> dict[str, Any]:
        """Returns {}: torch's clip_grad_norm_() deals with parameters of several meshes."""
        return {}

    def adjust_optimizer_kwargs(self, optimizer_cls: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns ``kwargs`` as they are."""
        return kwargs

    # ---- weights

    def get_full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns whole CPU tensors of parameters and persistent buffers, under all their names, on rank 0; {}
        elsewhere. Collective."""
        return full_state_dict(self.unwrap_model(model))

    def get_adapter_state_dict(self, model: nn.Module, adapter_name: str) -> dict[str, torch.Tensor]:
        """Returns one LoRA adapter's parameters as get_full_state_dict() does."""
        held, what = held_by(self.unwrap_model(model), None, saving=False), "get_adapter_state_dict()"
        refuse_foreign(what, held.memory, instead="for the weights")
        parts = [part for part in held.parts if _is_of_adapter(part.name, adapter_name)]
        return Gatherer(what, parts, RankGroup(held.process_group, None)).whole(held.names)

    def load_peft_weights(
        self, model: nn.Module, adapter_weights: Mapping[str, torch.Tensor] | None, adapter_name: str
    ) -> None:
        """Loads whole weights of an adapter, under PEFT's names in files or the model's own, into the model, sharded or
        not: every rank's, or rank 0's. Collective.

        Raises KeyError (a ValueError too; PeerFailedError on ranks without weights), before anything changes, where a
        name fits nothing or a weight is missing.
        """
        inner = self.unwrap_model(model)
        ranks = ranks_of(inner)
        has_weights = adapter_weights or ranks.rank == 0
        named = ranks.agree(
            "load_peft_weights()", lambda: _named(inner, adapter_weights or {}, adapter_name) if has_weights else None
        )
        Request("load_peft_weights()", inner, named, strict=False).run()

    # ---- the optimizer

    def save_optimizer_checkpoint(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, output_path: str | Path
    ) -> None:
        """Writes the whole state into one file of torch.save(), on rank 0; whole or not at all. Collective over all
        ranks."""
        raw, ranks = _raw(optimizer), all_ranks()
        if self.needs_wrapped_optimizer_state():
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state: Any = get_optimizer_state_dict(self.unwrap_model(model), raw, options=options)
        else:
            state = raw.state_dict()
        ranks.agree("save_optimizer_checkpoint()", lambda: files.write(state, output_path) if ranks.rank == 0 else None)

    def load_optimizer_checkpoint(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, input_path: str | Path
    ) -> None:
        """Loads what save_optimizer_checkpoint() wrote, here or in twinkle, at any number of ranks. Collective. Raises
        for other files."""
        raw, ranks = _raw(optimizer), all_ranks()
        wrapped = self.needs_wrapped_optimizer_state()
        reads = ranks.rank == 0 or not wrapped
        state = ranks.agree("load_optimizer_checkpoint()", lambda: foreign.loaded(input_path) if reads else {})
        if wrapped:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=ranks.size > 1)
            set_optimizer_state_dict(self.unwrap_model(model), raw, state, options=options)
        else:
            raw.load_state_dict(state)


def _raw(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the optimizer that accelerate's wrapper has."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def _is_of_adapter(name: str, adapter: str) -> bool:
    return adapter in name.split(".") and any(marker in name for marker in _LORA)


def _named(model: nn.Module, weights: Mapping[str, torch.Tensor], adapter: str) -> dict[str, torch.Tensor]:
    """Returns weights by the model's own names. A file of PEFT's has them without the adapter's, and without
    ``modules_to_save``."""
    held = held_by(model, None, saving=False)
    in_model = re.compile(rf"(\.modules_to_save)?\.{re.escape(adapter)}(?=\.|$)")
    held.names = {name: (*names, *(in_model.sub("", alias) for alias in names)) for name, names in held.names.items()}
    where = f"adapter '{adapter}'"
    compared = fit(held, weights, where)
    missing = [name for name in compared.missing if _is_of_adapter(name, adapter)]
    replace(compared, missing=missing).refuse("load_peft_weights()", where, KeyError)
    return {name: weights[key] for name, key in compared.keys.items()}


class NativeFSDPStrategy(Strategy):
    """Shards by fully_shard(). ``device_mesh``: twinkle's or torch's; None: nothing is wrapped. ``fsdp_config``:
    ``{"reshard_after_forward": bool}``.
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
        """Returns True where ranks but the first may build the model on meta, as twinkle's own do: wrap_model() sends
        them rank 0's weights."""
        return self._loads_on_rank_0()

    def wrap_model(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        """Applies fully_shard() to the layers (``_no_split_modules`` of any module, else ``model.model.layers``, else
        those of wrap()) and to the model. With memory_efficient_init rank 0's weights count. Warns without layers."""
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
    """Returns a mesh of all its ranks in one dimension; None where that is one rank."""
    if mesh is None or getattr(mesh, "mesh_dim_names", None) is None:
        return None
    flat = torch.as_tensor(mesh.mesh, device="cpu").flatten()
    return DeviceMesh(mesh.device_type or "cuda", flat, mesh_dim_names=("fsdp",)) if flat.numel() > 1 else None


class AccelerateStrategy(Strategy):
    """Shards by accelerate.

    ``device_mesh``: twinkle's or torch's, with dimensions named "dp" and "fsdp" ("tp", "cp", "sp"); None: no FSDP.
    ``ddp_config``: of accelerate's DistributedDataParallelKwargs. ``fsdp_config``: of its
    FullyShardedDataParallelPlugin, unchanged; ``fsdp_version`` is 2.

    ``memory_efficient_init``: all ranks get rank 0's weights; the others may have none, as after from_pretrained() in
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
        with environment_kept({}):
            self.fsdp_plugin = _plugin(sizes, mixed_precision, dict(fsdp_config or {}), memory_efficient_init)
            self.accelerator = Accelerator(
                mixed_precision=mixed_precision,
                fsdp_plugin=self.fsdp_plugin,
                parallelism_config=_parallelism(sizes),
                kwargs_handlers=handlers,
            )
        if self.fsdp_plugin is not None and not self.accelerator.is_fsdp2:
            warn(
                f"accelerate does no FSDP here ({self.accelerator.distributed_type}, {self.accelerator.device}): "
                "models will be replicated; NativeFSDPStrategy shards on CPUs too",
                RuntimeWarning,
            )

    def wrap_model(self, model: nn.Module, *args: Any) -> Any:
        """Calls ``accelerator.prepare(model, *args)`` and returns its result: (model, optimizer, ...), FSDP2's at once.
        Collective."""
        if not (self._memory_efficient_init and self.accelerator.is_fsdp2):
            return self.accelerator.prepare(model, *args)
        ranks = all_ranks()
        optimizers = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]

        def prepare() -> tuple[list[Bindings], Mapping[str, torch.Tensor] | None]:
            remember_all(model)
            return [bindings(optim, model) for optim in optimizers], own_weights(model) if ranks.rank == 0 else None

        bound, own = ranks.agree("wrap_model()", prepare)
        to_meta(model)
        for optimizer, places in zip(optimizers, bound, strict=True):
            bind(optimizer, places)  # else it would keep the whole model alive
        plugin = self.accelerator.state.fsdp_plugin
        # accelerate's own loading sends everything to every rank, and fails for persistent buffers.
        before, plugin.cpu_ram_efficient_loading = plugin.cpu_ram_efficient_loading, False
        try:
            prepared = self.accelerator.prepare(model, *args)
        finally:
            plugin.cpu_ram_efficient_loading = before
        materialize(model, own)
        for optimizer, places in zip(optimizers, bound, strict=True):
            # accelerate identifies parameters by their addresses, and on meta they have none.
            bind(optimizer, places)
        return prepared

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return self.accelerator.unwrap_model(model, keep_torch_compile=False)  # type: ignore[no-any-return]

    def needs_wrapped_optimizer_state(self) -> bool:
        return bool(self.accelerator.is_fsdp2)


def _sizes(mesh: Any) -> dict[str, int]:
    """Returns the sizes of a mesh's dimensions, by name."""
    names = None if mesh is None else getattr(mesh, "mesh_dim_names", None)
    return dict(zip(names, torch.as_tensor(mesh.mesh, device="cpu").shape, strict=True)) if names else {}


def _parallelism(sizes: Mapping[str, int]) -> Any:
    """Returns accelerate's ParallelismConfig; None where FSDP alone, or DDP alone, is what the mesh says."""
    from accelerate import ParallelismConfig

    dp, fsdp, tp, cp, sp = (sizes.get(name, 1) for name in ("dp", "fsdp", "tp", "cp", "sp"))
    if (dp == 1 or fsdp == 1) and tp == cp == sp == 1:
        return None
    return ParallelismConfig(dp_replicate_size=dp, dp_shard_size=fsdp, tp_size=tp, cp_size=cp, sp_size=sp)


def _plugin(sizes: Mapping[str, int], mixed_precision: str, config: dict[str, Any], memory_efficient: bool) -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    # Upstream looks for the version under the second key alone.
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


# ---- helpers for a model that is sharded before it has weights

_lock = threading.Lock()
_before: list[dict[str, str]] = []  # the variables as each open block found them


def _broadcast_sharded_state_dict(
    model: nn.Module, full_sd: Mapping[str, torch.Tensor], device_type: str = "cuda"
) -> None:
    """Loads rank 0's ``full_sd`` into the model's shards; the other ranks give {}. A model on meta gets memory on
    ``device_type``."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    materialize(model, full_sd if first else None, device=device_type)


def _get_non_persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns copies of non-persistent buffers, by every name that a buffer has."""
    return {
        slot.name: slot.recorded.clone()
        for prefix, module in model.named_modules()
        for slot in slots_of(module, prefix, "table")
    }


def _restore_non_persistent_buffers(
    model: nn.Module, saved_buffers: Mapping[str, torch.Tensor], device: torch.device | str
) -> None:
    for name, saved in saved_buffers.items():
        prefix, _, key = name.rpartition(".")
        model.get_submodule(prefix).register_buffer(key, saved.to(device), persistent=False)


def fsdp_pretrained_load_context(enabled: bool) -> AbstractContextManager[None]:
    """Returns a context in which transformers' from_pretrained() loads weights on rank 0 alone. It reads variables of
    the environment, which are the process's."""
    return environment_kept(dict.fromkeys(_VARIABLES, "true")) if enabled else contextlib.nullcontext()


@contextlib.contextmanager
def environment_kept(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for a block. When the last of several blocks, in whatever threads, has ended, the variables are
    restored, whatever the blocks and accelerate, which leaves its options there for transformers, made of them. Else a
    later from_pretrained() of a model that is not wrapped would leave all ranks but the first without weights."""
    with _lock:
        _before.append({name: os.environ[name] for name in _VARIABLES if name in os.environ})
        os.environ.update(variables)
    try:
        yield
    finally:
        with _lock:
            before = _before.pop()
            if not _before:  # it was the first block's
                for name in _VARIABLES:
                    os.environ.pop(name, None)
                os.environ.update(before)
