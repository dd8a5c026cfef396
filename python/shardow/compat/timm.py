"""timm's averages of a model: ModelEma, ModelEmaV2, ModelEmaV3 (timm.utils.model_ema, 1.0.31), and the checkpoints that
they are saved in. Signatures, attributes, keys and numbers are upstream's; integer buffers are copied, where V1 and
V2 truncate them."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardow.averaging.options import Replicas, Rule
from shardow.base.checks import invalid, unsupported
from shardow.compat._impl.averaged_copy import AveragedCopy, ChosenRule
from shardow.compat._impl.given_memory import Fate, Kind
from shardow.compat._impl.swapped_model_proxy import NARROW, Averaged, follow, load, whole_averages
from shardow.merging import foreign

#: Keys of averages in checkpoints: timm's own, tier4's Diffusion-Planner's, and another that timm reads.
KEYS = ("state_dict_ema", "ema_state_dict", "model_ema")


class ModelEma:
    """``ema``: a copy of ``model``, in eval mode, whose state is averaged: e * decay + (1 - decay) * p. ``device``:
    where it lives, by default with the model. ``resume``: a checkpoint's path.

    ``replicas="split"``: under DDP each rank keeps a part of the averages; ``ema`` is a proxy then, as for FSDP;
    calls are collective.
    """

    def __init__(
        self, model: nn.Module, decay: float = 0.9999, device: Any = "", resume: str | Path = "", *,
        replicas: Replicas = "copy",
    ) -> None:  # fmt: skip
        module, self._follower = follow(model, "two_products", device=device or None, replicas=replicas)
        self.ema = module.eval()
        self.decay = decay
        self.device = device
        self.ema_has_module = hasattr(self.ema, "module")
        if resume:
            load_ema_state_dict(self.ema, resume)
        for p in self.ema.parameters():
            p.requires_grad_(False)

    @property
    def module(self) -> nn.Module:
        """``ema``, by the name under which timm.utils.unwrap_model() looks for it."""
        return self.ema

    def update(self, model: nn.Module) -> None:
        """Updates the averages. Raises RuntimeError (KeyError of a missing name), before anything changes, where
        ``model`` differs in names or shapes."""
        self._follower.bind(self.ema, model).update(self.decay, 1.0 - self.decay)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the state of ``ema`` in fresh CPU tensors, whole also where it is sharded: then collective, on rank
        0, and {} elsewhere."""
        return whole_averages(self.ema)


class ModelEmaV2(Averaged):
    """``module``: as ``ema`` of ModelEma; decay * e + (1 - decay) * p. ``replicas``: as in ModelEma."""

    def __init__(
        self, model: nn.Module, decay: float = 0.9999, device: Any = None, *, replicas: Replicas = "copy"
    ) -> None:
        super().__init__(*follow(model, "two_products", device=device, replicas=replicas))
        self.module.eval()
        self.decay = decay
        self.device = device

    def update(self, model: nn.Module) -> None:
        """Updates the averages. Raises RuntimeError, before anything changes, where ``model`` differs in names or
        shapes."""
        self._follower.bind(self.module, model).update(self.decay, 1.0 - self.decay)

    def set(self, model: nn.Module) -> None:
        """Makes the averages equal to the model's state."""
        self._follower.bind(self.module, model).copy()


class ModelEmaV3(Averaged):
    """``module``: as ``ema`` of ModelEma; torch.lerp, e.mul_(1 - w).add_(p, alpha=w) where ``foreach`` meets two
    dtypes; w = 1 - get_decay(step).

    Args:
        min_decay, update_after_step, use_warmup, warmup_gamma, warmup_power: of the decay where update() is given a
            step, see get_decay().
        device, dtype: of the averages, by default the model's.
        stochastic_rounding: 16-bit averages are rounded stochastically, without bias, float16 ones too; the noise is
            not timm's. It comes from ``stochastic_rounding_seed``, the step and the element's place, so that it is the
            same on every rank and at any world size.
        foreach: costs nothing here, but selects the arithmetic.
        exclude_buffers: buffers are copied, all of them, and only parameters are averaged.
        replicas: as in ModelEma.
    """

    def __init__(
        self, model: nn.Module, decay: float = 0.9999, min_decay: float = 0.0, update_after_step: int = 0,
        use_warmup: bool = False, warmup_gamma: float = 1.0, warmup_power: float = 2 / 3, device: Any = None,
        dtype: torch.dtype | None = None, stochastic_rounding: bool = True, stochastic_rounding_seed: int = 0,
        foreach: bool = True, exclude_buffers: bool = False, *, replicas: Replicas = "copy",
    ) -> None:  # fmt: skip
        first = next(model.parameters(), None)
        if device is not None and first is not None and device != first.device:
            foreach = False
        rule: ChosenRule = functools.partial(_rule_of_foreach, stochastic_rounding) if foreach else "lerp"
        choose = _parameters_alone if exclude_buffers else _saved_floats
        rounding: dict[str, Any] = {"stochastic": stochastic_rounding, "seed": stochastic_rounding_seed}
        super().__init__(*follow(model, rule, choose, device=device, dtype=dtype, replicas=replicas, **rounding))
        self.module.eval()
        self.decay, self.min_decay, self.update_after_step = decay, min_decay, update_after_step
        self.use_warmup, self.warmup_gamma, self.warmup_power = use_warmup, warmup_gamma, warmup_power
        self.device, self.dtype, self.foreach, self.exclude_buffers = device, dtype, foreach, exclude_buffers
        self.stochastic_rounding, self.stochastic_rounding_seed = stochastic_rounding, stochastic_rounding_seed

    def get_decay(self, step: int | None = None) -> float:
        """Returns ``decay`` without a step. With one, n = step - update_after_step - 1: 0 where n <= 0 (a copy); else
        ``decay``, and in a warm-up 1 - (1 + n / warmup_gamma) ** -warmup_power between ``min_decay`` and ``decay``."""
        counted = 1 if step is None else step - self.update_after_step - 1
        if counted <= 0:
            return 0.0
        if step is None or not self.use_warmup:
            return self.decay
        warming: float = 1 - (1 + counted / self.warmup_gamma) ** -self.warmup_power
        return max(min(warming, self.decay), self.min_decay)

    def update(self, model: nn.Module, step: int | None = None) -> None:
        """Updates the averages. Raises RuntimeError, before anything changes, where ``model`` differs in names or
        shapes."""
        self._average(model, self.get_decay(step), self.exclude_buffers)

    def apply_update_(self, model: nn.Module, decay: float) -> None:
        """Makes an update() by ``decay``; buffers are averaged. Raises NotImplementedError for proxies made with
        ``exclude_buffers``."""
        self._average(model, decay, exclude_buffers=False)

    def apply_update_no_buffers_(self, model: nn.Module, decay: float) -> None:
        """Makes an update() by ``decay``; buffers are copied. Raises NotImplementedError for proxies made without
        ``exclude_buffers``."""
        self._average(model, decay, exclude_buffers=True)

    def _average(self, model: nn.Module, decay: float, exclude_buffers: bool) -> None:
        follower = self._follower
        if exclude_buffers != self.exclude_buffers:
            if not isinstance(follower, AveragedCopy):
                raise unsupported(f"averages with exclude_buffers={self.exclude_buffers} stay so; make others")
            follower = follower.with_choice(_parameters_alone if exclude_buffers else _saved_floats)
        weight = 1.0 - decay
        follower.bind(self.module, model).update(1.0 - weight, weight)

    def set(self, model: nn.Module) -> None:
        """Makes the averages equal to the model's state."""
        self._follower.bind(self.module, model).copy()


def _rule_of_foreach(stochastic: bool, dtypes: list[tuple[torch.dtype, torch.dtype]]) -> Rule:
    """Returns the rule for pairs of dtypes. torch._foreach_lerp_() wants one dtype, of all pairs that are not rounded
    stochastically."""
    same_dtype = all(weight == average for weight, average in dtypes if not (stochastic and average in NARROW))
    return "lerp" if same_dtype else "mul_add"


def _saved_floats(name: str, tensor: torch.Tensor, kind: Kind) -> Fate:
    if kind == "table":
        return "leave"
    return "average" if tensor.is_floating_point() else "copy"


def _parameters_alone(name: str, tensor: torch.Tensor, kind: Kind) -> Fate:
    return "average" if kind == "parameter" and tensor.is_floating_point() else "copy"


def load_ema_state_dict(module: nn.Module, checkpoint: str | Path | Mapping[str, Any], strict: bool = True) -> None:
    """Loads the averages of a training checkpoint (``{"state_dict_ema": ...}``, ``{"ema_state_dict": ...}``) into
    ``module``: a model, plain, wrapped or sharded, or what is averaged here (``ema`` of ModelEma, ``module`` of the
    others). ``module.`` and other wrappers' names don't matter, on either side. Collective where ranks share the
    module.

    Raises:
        KeyError: the checkpoint has no averages. RuntimeError: shapes differ or, if ``strict``, names; no name fits.
            Nothing has changed.
    """
    load("load_ema_state_dict()", module, lambda: _averages_in(checkpoint), strict)


def _averages_in(checkpoint: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    where = "the checkpoint" if isinstance(checkpoint, Mapping) else f"{checkpoint}"
    if not isinstance(checkpoint, Mapping):
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm saves its arguments too
            checkpoint = foreign.loaded(checkpoint)
    if not isinstance(checkpoint, Mapping):
        raise invalid(f"{where} is a {type(checkpoint).__name__}, not a dict with {' or '.join(KEYS)}", AssertionError)
    averages = next((checkpoint[key] for key in KEYS if checkpoint.get(key) is not None), None)
    if not isinstance(averages, Mapping):
        keys = f"none of {', '.join(KEYS)} among {', '.join(map(repr, list(checkpoint)[:8]))}"
        raise invalid(f"{where} has no averages: {keys}; to begin with the model's weights, load nothing", KeyError)
    return averages


__all__ = ["ModelEma", "ModelEmaV2", "ModelEmaV3", "load_ema_state_dict"]
