"""diffusers' EMAModel (0.42): the averages of a list of parameters, with warm-up schedules, saved as a model of their
own.

Names, state, files and arithmetic are upstream's, bit for bit: e <- e - (1 - d) (e - p), with ``foreach`` as one
fused step; parameters that want no gradient are copied. This module needs no diffusers; save_pretrained() and
from_pretrained() do.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardow import errors
from shardow.base.checks import fraction, invalid, unsupported, warn
from shardow.compat._impl.parameter_list import ParameterList, assign, copies, loaded, moved
from shardow.distributed.rank_group import RankGroup, Step, equal_facts
from shardow.files.checkpoint import save
from shardow.sharding.dtensor import sharded_like
from shardow.sharding.fsdp_ownership import resharded
from shardow.sharding.local_state import group_of
from shardow.start.materialize import load
from shardow.start.meta import on_meta

__all__ = ["EMAModel"]

Parameters = Iterable[torch.Tensor]
_WEIGHTS = "diffusion_pytorch_model.safetensors"  # as diffusers.utils.SAFETENSORS_WEIGHTS_NAME
_INDEX = _WEIGHTS + ".index.json"
_SHARD = re.compile(r"diffusion_pytorch_model-\d{5}-of-\d{5}\.(safetensors|bin)")


class EMAModel:
    """Averages of ``parameters``; the decay of step n is that of shardow.schedules.diffusers().

    ``model_cls``, ``model_config``: of diffusers, for save_pretrained(). ``foreach``: rounds as upstream does with it.
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
        """Reads what save_pretrained() wrote, here or in diffusers, with its counters. ``parameters``: of the model
        that is trained; of DTensors each rank reads its own slices; collective. Without them the averages are whole, on
        the CPU."""
        folder = Path(path)
        if parameters is None:
            config, model = model_cls.load_config(str(folder)), model_cls.from_pretrained(str(folder))
            shadows = [parameter.detach() for parameter in model.parameters()]
        else:
            shadows = copies(parameters)
            config, model = _fill(shadows, folder, model_cls)
        ema = cls([], model_cls=model_cls, model_config=model.config, foreach=foreach)
        ema.shadow_params = shadows
        ema.load_state_dict({key: config[key] for key in ema._counters() if key in config})
        return ema

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Writes a directory that ``model_cls.from_pretrained()`` takes; the counters are in its config.json.
        Collective where the averages are DTensors: every rank writes its own bytes. Else for one rank alone."""
        if self.model_cls is None or self.model_config is None:
            missing = "model_cls" if self.model_cls is None else "model_config"
            raise invalid(f"save_pretrained() needs {missing}=, which was not given when this was made")
        folder, ranks, what = Path(path), _ranks(self.shadow_params), "save_pretrained()"
        model_cls, model_config = self.model_cls, self.model_config

        def prepare() -> Step[tuple[Any, dict[str, torch.Tensor]]]:
            model = _on_meta(model_cls, model_config)
            state = _named(model, self.shadow_params)
            if ranks.rank == 0:
                model.register_to_config(**self._counters())
            facts = {"path": str(folder.absolute()), "optimization_step": self.optimization_step}
            return Step((model, state), [equal_facts(what, facts, ranks)])

        def finish() -> None:
            if ranks.rank == 0:
                model.save_config(str(folder))
                (folder / _INDEX).unlink(missing_ok=True)  # of an earlier save in several files
                for shard in [file for file in folder.iterdir() if _SHARD.fullmatch(file.name)]:
                    shard.unlink()

        model, state = ranks.step(what, prepare)
        save(state, folder / _WEIGHTS, group=ranks.process_group)
        ranks.agree(what, finish)

    def get_decay(self, optimization_step: int) -> float:
        """Returns the decay of a step, counted from 1."""
        step = max(0, optimization_step - self.update_after_step - 1)
        if step <= 0:
            return 0.0
        warm = 1 - (1 + step / self.inv_gamma) ** -self.power if self.use_ema_warmup else (1 + step) / (10 + step)
        return max(min(warm, self.decay), self.min_decay)

    def step(self, parameters: Parameters | nn.Module) -> None:
        """Updates the averages after an optimizer step."""
        step = self.optimization_step + 1
        decay = self.get_decay(step)
        self._averages.update(self.shadow_params, _listed(parameters), decay, 1 - decay)
        self.optimization_step, self.cur_decay_value = step, decay

    def copy_to(self, parameters: Parameters) -> None:
        """Copies the averages into the parameters. FSDP's unsharded copies are freed; a backward through the old
        weights raises."""
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
        """Returns the counters and ``shadow_params``, which are this object's own. Of a sharded model, this rank's
        part."""
        return {**self._counters(), "shadow_params": self.shadow_params}

    def _counters(self) -> dict[str, Any]:
        names = ("decay", "min_decay", "optimization_step", "update_after_step", "use_ema_warmup", "inv_gamma", "power")
        return {name: getattr(self, name) for name in names}

    def store(self, parameters: Parameters) -> None:
        """Copies the parameters to the CPU for restore(), sharded as they are."""
        self.temp_stored_params = [p.detach().to("cpu", copy=True) for p in resharded(parameters)]

    def restore(self, parameters: Parameters) -> None:
        """Copies the stored values into the parameters; they are not stored any more."""
        if self.temp_stored_params is None:
            raise invalid("restore(): nothing was stored; call store() first", RuntimeError)
        assign(list(parameters), self.temp_stored_params)
        self.temp_stored_params = None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies a state, whole or in part. Of whole tensors, sharded averages take their part. Raises ValueError,
        before anything changes, for what does not fit."""
        counters = {name: state_dict.get(name, value) for name, value in self._counters().items()}
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
    """Returns (decay, min_decay, device), with the values of deprecated names."""
    instead = {"max_value": "decay=", "min_value": "min_decay=", "device": "to()"}
    for name, value in kwargs.items():
        if name not in instead:
            warn(f"EMAModel() has no option {name!r}; it is ignored, as in diffusers")
        elif value is not None:
            warn(f"{name}= is deprecated; use {instead[name]}", FutureWarning)
    values = {name: value for name, value in kwargs.items() if value is not None}
    return values.get("max_value", decay), values.get("min_value", min_decay), values.get("device")


# ---- a diffusers model's directory: its class gives the parameters' names, from a copy on meta, and writes its own
# config; the tensors go through shardow's files


def _fill(shadows: list[torch.Tensor], folder: Path, model_cls: Any) -> tuple[Mapping[str, Any], Any]:
    """Fills averages from a directory. Returns its config, and its model on meta. Collective of DTensors."""
    ranks = _ranks(shadows)

    def prepare() -> tuple[Mapping[str, Any], Any, list[str]]:
        config, index = model_cls.load_config(str(folder)), folder / _INDEX
        model = _on_meta(model_cls, config)
        _check(model, shadows)
        files = sorted({*json.loads(index.read_text())["weight_map"].values()}) if index.exists() else [_WEIGHTS]
        if outside := [file for file in files if Path(file).name != file]:
            raise errors.make("corrupt", f"{index}: '{outside[0]}' is no plain file name")
        return config, model, files

    config, model, files = ranks.agree("from_pretrained()", prepare)
    tensors = dict(zip((name for name, _ in model.named_parameters()), shadows, strict=True))
    missing = set(tensors)
    for file in files:
        missing &= {*load(tensors, folder / file, strict=False, group=ranks.process_group)["missing"]}
    if missing:
        raise invalid(f"{folder} has no '{min(missing)}'; is it another model's?")
    return config, model


def _ranks(shadows: Sequence[torch.Tensor]) -> RankGroup:
    return RankGroup(group_of({str(i): t for i, t in enumerate(shadows)}, None), None)


def _on_meta(model_cls: Any, config: Mapping[str, Any]) -> Any:
    with on_meta(buffers=False):
        return model_cls.from_config(dict(config))


def _check(model: nn.Module, shadows: Sequence[torch.Tensor]) -> None:
    named = dict(model.named_parameters())
    if len(named) != len(shadows):
        raise invalid(f"a {type(model).__name__} of this config has {len(named)} parameters; {len(shadows)} averages")
    for (name, param), shadow in zip(named.items(), shadows, strict=True):
        if shadow.dim() == 1 and param.dim() > 1:
            flat = f"the average of '{name}' is a flat piece of {shadow.numel()} elements, as FSDP1 has them"
            way_out = "save state_dict() on every rank, or copy_to() the model and save that one whole, then restore()"
            raise invalid(f"{flat}, of which no {type(model).__name__} can be saved; {way_out}", RuntimeError)
        if param.shape != shadow.shape:
            expected = f"{tuple(param.shape)} in a {type(model).__name__} of this config"
            raise invalid(f"'{name}' is {expected}, its average {tuple(shadow.shape)}", RuntimeError)


def _named(model: nn.Module, shadows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the model's state_dict() with averages in the dtypes of its parameters, under all of their names."""
    _check(model, shadows)
    by_parameter = {
        id(parameter): shadow.to(parameter.dtype) if shadow.is_floating_point() else shadow
        for parameter, shadow in zip(model.parameters(), shadows, strict=True)
    }
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return {name: by_parameter.get(id(tensor), tensor) for name, tensor in state.items()}
