"""diffusers' EMAModel (0.42): the averages of a list of parameters, with warm-up schedules, saved as a model of their
own.

Names, state, files and arithmetic are the origin's, bit for bit: e <- e - (1 - d) (e - p), with ``foreach`` as one
fused step; parameters that want no gradient are copied. This module needs no diffusers; save_pretrained() and
from_pretrained() do.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shardow.base.checks import fraction, invalid, unsupported, warn
from shardow.compat._impl.parameter_list import ParameterList, assign, copies, loaded, moved
from shardow.compat.files.diffusers_files import read, write
from shardow.model.dtensor import sharded_like
from shardow.model.owners import resharded

Parameters = Iterable[torch.Tensor]


class EMAModel:
    """Averages of ``parameters``; the decay of step n is that of shardow.schedules.diffusers().

    ``model_cls``, ``model_config``: of diffusers, for save_pretrained(). ``foreach``: the origin's other rounding.
    DTensors and FSDP1's shards are averaged as they are; nothing but save_pretrained() and from_pretrained(parameters=)
    of DTensors is collective.
    """

    def __init__(
        self, parameters: Parameters | nn.Module, decay: float = 0.9999, min_decay: float = 0.0,
        update_after_step: int = 0,
        use_ema_warmup: bool = False, inv_gamma: float | int = 1.0, power: float | int = 2 / 3, foreach: bool = False,
        model_cls: Any | None = None, model_config: Mapping[str, Any] | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        use_ema_warmup = use_ema_warmup or isinstance(parameters, nn.Module)  # of the deprecated form
        decay, min_decay, device = _deprecated(kwargs, decay, min_decay)
        self.decay, self.min_decay = fraction("decay", decay), fraction("min_decay", min_decay)
        listed = _listed(parameters)
        if any(hasattr(p, "ds_tensor") for p in listed):
            raise unsupported(
                "these parameters are partitioned by DeepSpeed ZeRO-3, and don't tell of the model: use "
                "shardow.integrations.deepspeed.ema(engine)"
            )
        self.shadow_params = copies(listed)
        self.temp_stored_params: list[torch.Tensor] | None = None
        self.update_after_step, self.use_ema_warmup = update_after_step, use_ema_warmup
        self.inv_gamma, self.power = inv_gamma, power
        self.optimization_step = 0
        self.cur_decay_value: float | None = None
        self.foreach, self.model_cls, self.model_config = foreach, model_cls, model_config
        self._averages = ParameterList("fused_difference" if foreach else "difference", copy_frozen=True)
        if device is not None:
            self.to(device=device)

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], model_cls: Any, foreach: bool = False, parameters: Parameters | None = None
    ) -> EMAModel:
        """What save_pretrained() wrote, here or in diffusers, with its counters. ``parameters``: of the model that is
        trained; of DTensors each rank reads its own slices; collective. Without them the averages are whole, on the
        CPU."""
        config, model_config, shadows = read(path, model_cls, None if parameters is None else copies(parameters))
        ema = cls([], model_cls=model_cls, model_config=model_config, foreach=foreach)
        ema.shadow_params = shadows
        ema.load_state_dict({key: config[key] for key in ema._counters() if key in config})
        return ema

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """A directory that ``model_cls.from_pretrained()`` takes; the counters are in its config.json. Collective where
        the averages are DTensors: every rank writes its own bytes. Else for one rank alone."""
        if self.model_cls is None or self.model_config is None:
            missing = "model_cls" if self.model_cls is None else "model_config"
            raise invalid(f"save_pretrained() needs {missing}=, which was not given when this was made")
        write(path, self.model_cls, self.model_config, self._counters(), self.shadow_params)

    def get_decay(self, optimization_step: int) -> float:
        """The decay of a step, counted from 1."""
        step = max(0, optimization_step - self.update_after_step - 1)
        if step <= 0:
            return 0.0
        warm = 1 - (1 + step / self.inv_gamma) ** -self.power if self.use_ema_warmup else (1 + step) / (10 + step)
        return max(min(warm, self.decay), self.min_decay)

    def step(self, parameters: Parameters | nn.Module) -> None:
        """After an optimizer step."""
        step = self.optimization_step + 1
        decay = self.get_decay(step)
        self._averages.update(self.shadow_params, _listed(parameters), decay, 1 - decay)
        self.optimization_step, self.cur_decay_value = step, decay

    def copy_to(self, parameters: Parameters) -> None:
        """The averages into the parameters. FSDP's unsharded copies are freed; a backward through the old weights
        raises.
        """
        assign(list(parameters), self.shadow_params)

    def pin_memory(self) -> None:
        """Moves the averages to page-locked memory; needs an accelerator."""
        self.shadow_params = [
            sharded_like(t, t._local_tensor.pin_memory()) if hasattr(t, "_local_tensor") else t.pin_memory()  # type: ignore[arg-type]
            for t in self.shadow_params
        ]

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> None:
        """Moves the averages; the dtype is of floating tensors."""
        self.shadow_params = moved(self.shadow_params, device, dtype, non_blocking)

    def state_dict(self) -> dict[str, Any]:
        """The counters and ``shadow_params``, which are this object's own. Of a sharded model, this rank's part."""
        return {**self._counters(), "shadow_params": self.shadow_params}

    def _counters(self) -> dict[str, Any]:
        names = ("decay", "min_decay", "optimization_step", "update_after_step", "use_ema_warmup", "inv_gamma", "power")
        return {name: getattr(self, name) for name in names}

    def store(self, parameters: Parameters) -> None:
        """Copies the parameters to the CPU for restore(), sharded as they are."""
        self.temp_stored_params = [p.detach().to("cpu", copy=True) for p in resharded(parameters)]

    def restore(self, parameters: Parameters) -> None:
        """The stored values into the parameters; they are not stored any more."""
        if self.temp_stored_params is None:
            raise invalid("restore(): nothing was stored; call store() first", RuntimeError)
        assign(list(parameters), self.temp_stored_params)
        self.temp_stored_params = None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies a state, whole or in part. Of whole tensors, sharded averages take their part. Raises ValueError,
        before anything changes, for what does not fit."""
        counters = {name: state_dict.get(name, now) for name, now in self._counters().items()}
        fraction("decay", counters["decay"])
        for name, kinds in _KINDS.items():
            if not isinstance(counters[name], kinds):
                raise invalid(f"{name}={counters[name]!r}; it must be {' or '.join(kind.__name__ for kind in kinds)}")
        shadows = state_dict.get("shadow_params")
        if shadows is not None:
            shadows = loaded("shadow_params", shadows, self.shadow_params)
        vars(self).update(counters)
        self.shadow_params = self.shadow_params if shadows is None else shadows


_KINDS: dict[str, tuple[type, ...]] = {
    "min_decay": (float, int), "optimization_step": (int,), "update_after_step": (int,), "use_ema_warmup": (bool,),
    "inv_gamma": (float, int), "power": (float, int),
}  # fmt: skip


def _listed(parameters: Parameters | nn.Module) -> list[torch.Tensor]:
    if isinstance(parameters, nn.Module):
        warn("a Module in place of its parameters is deprecated; pass model.parameters()", FutureWarning)
        return list(parameters.parameters())
    return list(parameters)


def _deprecated(kwargs: dict[str, Any], decay: float, min_decay: float) -> tuple[float, float, Any]:
    """(decay, min_decay, device) with what old names say."""
    instead = {"max_value": "decay=", "min_value": "min_decay=", "device": "to()"}
    for name, value in kwargs.items():
        if name not in instead:
            warn(f"EMAModel() has no option {name!r}; it is ignored, as in diffusers")
        elif value is not None:
            warn(f"{name}= is deprecated; use {instead[name]}", FutureWarning)
    given = {name: value for name, value in kwargs.items() if value is not None}
    return given.get("max_value", decay), given.get("min_value", min_decay), given.get("device")


__all__ = ["EMAModel"]
