"""What twinkle's strategies have in common: whole states, adapters and the optimizer's checkpoint, with one model on
many ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from shardow.base.checks import invalid
from shardow.compat._impl.swapped_model_proxy import all_ranks, ranks_of
from shardow.compat.files import torch_files
from shardow.compat.files.torch_files import whole_state_dict
from shardow.compat.twinkle.helpers import fsdp_pretrained_load_context
from shardow.model.parts import held_by
from shardow.start.materialize import Request

_LORA = ("lora_A", "lora_B", "lora_embedding")


class Strategy(ABC):
    device_mesh: Any
    _memory_efficient_init: bool

    def pretrained_load_context(self) -> AbstractContextManager[None]:
        """Inside, from_pretrained() loads weights on rank 0 alone, if ``memory_efficient_init``."""
        return fsdp_pretrained_load_context(self._loads_on_rank_0())

    def _loads_on_rank_0(self) -> bool:
        return self._memory_efficient_init and self.device_mesh is not None

    @abstractmethod
    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The model without what wrap_model() put around it."""

    @abstractmethod
    def needs_wrapped_optimizer_state(self) -> bool:
        """True where the optimizer's state can only be saved and loaded after wrap_model()."""

    # ---- expert parallelism, which is the model's own business here

    def capture_pre_ep_state_if_needed(self, model: nn.Module, *, enable_ep: bool) -> None:
        """Nothing: experts are sharded before wrap_model(), which leaves them as they are."""
        return

    def prepare_adapter_config(self, config_or_dir: Any, *, enable_ep: bool) -> Any:
        """As it is."""
        return config_or_dir

    def get_ep_clip_kwargs(self, model: nn.Module) -> dict[str, Any]:
        """{}: torch's clip_grad_norm_() deals with parameters of several meshes."""
        return {}

    def adjust_optimizer_kwargs(self, optimizer_cls: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """As they are."""
        return kwargs

    # ---- weights

    def get_full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Whole CPU tensors of parameters and persistent buffers, under all their names, on rank 0; {} elsewhere.
        Collective.
        """
        return whole_state_dict(self.unwrap_model(model))

    def get_adapter_state_dict(self, model: nn.Module, adapter_name: str) -> dict[str, torch.Tensor]:
        """The same of one LoRA adapter's parameters."""
        return whole_state_dict(self.unwrap_model(model), lambda name: _is_of_adapter(name, adapter_name))

    def load_peft_weights(
        self, model: nn.Module, adapter_weights: Mapping[str, torch.Tensor] | None, adapter_name: str
    ) -> None:
        """Whole weights of an adapter, under PEFT's names in files or the model's own, into the model, sharded or not:
        every rank's, or rank 0's. Collective.

        Raises KeyError (a ValueError too; PeerFailedError on ranks without weights), before anything changes, where a
        name fits nothing or a weight is missing.
        """
        inner = self.unwrap_model(model)
        ranks = ranks_of(inner)
        given = adapter_weights or ranks.rank == 0
        found = ranks.agree(
            "load_peft_weights()", lambda: _named(inner, adapter_weights or {}, adapter_name) if given else None
        )
        Request("load_peft_weights()", inner, found, strict=False).run()

    # ---- the optimizer

    def save_optimizer_checkpoint(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, output_path: str | Path
    ) -> None:
        """The whole state into one file of torch.save(), which rank 0 writes; whole or not at all. Collective over all
        ranks.
        """
        raw, ranks = _raw(optimizer), all_ranks()
        if self.needs_wrapped_optimizer_state():
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state: Any = get_optimizer_state_dict(self.unwrap_model(model), raw, options=options)
        else:
            state = raw.state_dict()
        ranks.agree(
            "save_optimizer_checkpoint()", lambda: torch_files.write(state, output_path) if ranks.rank == 0 else None
        )

    def load_optimizer_checkpoint(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, input_path: str | Path
    ) -> None:
        """What save_optimizer_checkpoint() wrote, here or in twinkle, at any number of ranks. Collective. Raises for
        other files.
        """
        raw, ranks = _raw(optimizer), all_ranks()
        wrapped = self.needs_wrapped_optimizer_state()
        reads = ranks.rank == 0 or not wrapped
        state = ranks.agree("load_optimizer_checkpoint()", lambda: torch_files.read(input_path) if reads else {})
        if wrapped:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=ranks.size > 1)
            set_optimizer_state_dict(self.unwrap_model(model), raw, state, options=options)
        else:
            raw.load_state_dict(state)


def _raw(optimizer: Any) -> torch.optim.Optimizer:
    """Of accelerate's wrapper, what is in it."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def _is_of_adapter(name: str, adapter: str) -> bool:
    return adapter in name.split(".") and any(marker in name for marker in _LORA)


def _named(model: nn.Module, weights: Mapping[str, torch.Tensor], adapter: str) -> dict[str, torch.Tensor]:
    """By the model's own names."""
    names = {alias: name for name, aliases in held_by(model, None, saving=False).names.items() for alias in aliases}
    places = {key: next((names[one] for one in _called(key, adapter) if one in names), None) for key in weights}
    unknown = [key for key, name in places.items() if name is None]
    found = {name: weights[key] for key, name in places.items() if name is not None}
    missing = sorted({name for name in names.values() if _is_of_adapter(name, adapter)} - found.keys())
    if unknown or missing:
        raise invalid(
            f"load_peft_weights(): adapter '{adapter}' does not fit, nothing was loaded: missing "
            f"{', '.join(missing[:8]) or 'nothing'}; fits nothing: {', '.join(unknown[:8]) or 'nothing'}",
            KeyError,
        )
    return found


def _called(key: str, adapter: str) -> Iterator[str]:
    """What PEFT may call in the model what it calls ``key`` in a file."""
    prefix, _, last = key.rpartition(".")
    yield from (key, f"{prefix}.{adapter}.{last}", f"{key}.{adapter}", f"{prefix}.modules_to_save.{adapter}.{last}")
