"""ema-pytorch's EMA (0.8): a module with a copy of a model in it, whose weights are the averages.

Names, state and arithmetic are upstream's: torch.lerp with weight 1 - d, where d = clamp(1 - (1 + k /
inv_gamma)^-power, min_value, beta) in float32 and k counts the steps past update_after_step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from shardow.averaging import copies
from shardow.averaging.options import Replicas
from shardow.base.checks import invalid, unsupported
from shardow.compat._impl.averaged_copy import AveragedCopy, everything
from shardow.compat._impl.given_memory import Fate, GivenMemory, Kind, warn_of_rounding
from shardow.compat._impl.swapped_model_proxy import (
    AveragesOfProxy,
    Follower,
    SwappedModelProxy,
    proxy_for,
    whole_averages,
)
from shardow.sharding.modules import modes_kept
from shardow.sharding.names import called


class EMA(nn.Module):
    """The averages of ``model``; call it as the model.

    Args:
        ema_model: the model to keep them in, or a function that makes it; by default a deep copy. Of an FSDP model, a
            proxy, whose calls are collective.
        beta: the greatest decay. ``min_value``: the least. ``inv_gamma``, ``power``: of the schedule.
        update_after_step: the averages are copies up to this step.
        update_every: steps between updates.
        param_or_buffer_names_no_ema: names that are copied. ``ignore_names``, ``ignore_startswith_names``: left alone
            then.
        include_online_model: the model is a submodule, and in state_dict().
        update_model_with_ema_every: steps after which the model gets its averages, by ``update_model_with_ema_beta`` of
            its own weights.
        forward_method_names: methods of the averaged model that this module has too.
        move_ema_to_online_device: averages move to the device of the model's first parameter.
        lazy_init_ema: the copy is made at the first update.
        allow_different_devices, coerce_dtype, use_foreach: accepted; devices and dtypes may differ anyway, and
            there is one pass.
        replicas: "split": under DDP, ranks divide the averages (ours).
    """

    initted: torch.Tensor
    step: torch.Tensor

    def __init__(
        self, model: nn.Module, ema_model: nn.Module | Callable[[], nn.Module] | None = None, beta: float = 0.9999,
        update_after_step: int = 100, update_every: int = 10, inv_gamma: float = 1.0, power: float = 2 / 3,
        min_value: float = 0.0, param_or_buffer_names_no_ema: Iterable[str] = (), ignore_names: Iterable[str] = (),
        ignore_startswith_names: Iterable[str] = (), include_online_model: bool = True,
        allow_different_devices: bool = False, use_foreach: bool = False,
        update_model_with_ema_every: int | None = None, update_model_with_ema_beta: float = 0.0,
        forward_method_names: tuple[str, ...] = (), move_ema_to_online_device: bool = False, coerce_dtype: bool = False,
        lazy_init_ema: bool = False, replicas: Replicas = "copy",
    ) -> None:  # fmt: skip
        super().__init__()
        if not isinstance(model, nn.Module):
            raise unsupported(f"model is a {type(model).__name__}; averages of tensors: shardow.compat.torch_ema")
        if isinstance(param_or_buffer_names_no_ema, str) or isinstance(ignore_names, str):
            raise invalid("names that are not averaged, or ignored, come as a set", AssertionError)
        if lazy_init_ema and ema_model is not None:
            raise invalid("lazy_init_ema=True makes the copy at the first update; leave ema_model= out", AssertionError)
        self.beta, self.inv_gamma, self.power, self.min_value = beta, inv_gamma, power, min_value
        self.is_frozen = beta == 1.0
        self.update_after_step, self.update_every = update_after_step, update_every
        self.param_or_buffer_names_no_ema = set(param_or_buffer_names_no_ema)
        self.ignore_names, self.ignore_startswith_names = set(ignore_names), set(ignore_startswith_names)
        self.include_online_model = include_online_model
        self.online_model = model if include_online_model else [model]
        self.allow_different_devices = allow_different_devices
        self.coerce_dtype, self.use_foreach = coerce_dtype, use_foreach
        self.update_model_with_ema_every = update_model_with_ema_every
        self.update_model_with_ema_beta = update_model_with_ema_beta
        self.forward_method_names = forward_method_names
        self.move_ema_to_online_device = move_ema_to_online_device
        self._replicas = replicas
        #: Followers, by whether the model follows its averages: (models and names that it was made for, follower).
        self._followers: dict[bool, tuple[Any, Follower]] = {}
        self.ema_model: Any = None
        if not lazy_init_ema:
            self.init_ema(ema_model if isinstance(ema_model, nn.Module) or ema_model is None else ema_model())
        self.register_buffer("initted", torch.tensor(False, device=None))
        self.register_buffer("step", torch.tensor(0, device=None))

    def init_ema(self, ema_model: nn.Module | None = None) -> None:
        """Makes the averaged model. Raises ValueError where the model cannot be copied."""
        self.ema_model = self._second_model() if ema_model is None else ema_model
        for p in self.ema_model.parameters():
            p.requires_grad_(False)
        is_proxy = isinstance(self.ema_model, SwappedModelProxy)
        named = self.model if is_proxy else self.ema_model
        for name in self.forward_method_names:
            method = getattr(named, name)
            setattr(self, name, partial(self.ema_model.run, method) if is_proxy else method)
        self.parameter_names = {name for name, p in named.named_parameters() if p.is_floating_point() or p.is_complex()}
        self.buffer_names = {name for name, b in named.named_buffers() if b.is_floating_point() or b.is_complex()}

    def _second_model(self) -> nn.Module:
        proxy = proxy_for(self.model, "lerp", everything, replicas=self._replicas)
        if proxy is not None:
            return proxy
        try:
            return copy.deepcopy(self.model)
        except Exception as error:
            raise invalid(f"the model cannot be copied ({error}); give a second one as ema_model=") from error

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.online_model if self.include_online_model else self.online_model[0]  # type: ignore[assignment, index]
        return model

    # ---- use

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.ema_model(*args, **kwargs)

    def eval(self) -> Any:
        """Returns the averaged model, in evaluation mode."""
        return self.ema_model.eval()

    @torch.no_grad()
    def forward_eval(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the averaged model in evaluation mode, without gradients; modes are what they were afterwards."""
        with modes_kept(self.ema_model):
            return self.eval()(*args, **kwargs)

    def restore_ema_model_device(self) -> None:
        """Moves the averaged model to where this module's counters are."""
        self.ema_model.to(self.initted.device)

    def get_params_iter(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, p) for name, p in model.named_parameters() if name in self.parameter_names)

    def get_buffers_iter(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, b) for name, b in model.named_buffers() if name in self.buffer_names)

    # ---- averaging

    def add_to_optimizer_post_step_hook(self, optimizer: torch.optim.Optimizer) -> torch.utils.hooks.RemovableHandle:
        """Calls update() after every step of the optimizer, until the returned handle is removed."""
        if not hasattr(optimizer, "register_step_post_hook"):
            raise invalid(f"a {type(optimizer).__name__} has no hooks after steps; call update()", AssertionError)
        return optimizer.register_step_post_hook(lambda *_: self.update())

    def get_current_decay(self) -> float:
        """Returns the decay, computed in float32 as upstream does: the last bits depend on it."""
        epoch = (self.step - self.update_after_step - 1).clamp(min=0.0)
        if epoch.item() <= 0:
            return 0.0
        value: torch.Tensor = 1 - (1 + epoch / self.inv_gamma) ** -self.power
        return float(value.clamp(min=self.min_value, max=self.beta).item())

    def update(self) -> None:
        """Updates the averages after an optimizer step. Only every ``update_every``-th step, from the first, changes
        anything; a failed one is not counted."""
        step = int(self.step.item())
        self.step += 1
        try:
            self._advance(step)
        except BaseException:
            self.step -= 1
            raise

    def _advance(self, step: int) -> None:
        if not self.initted.item():
            if self.ema_model is None:
                self.init_ema()
            self.copy_params_from_model_to_ema()
            self.initted.fill_(True)
            return
        due = step % self.update_every == 0
        if due and step <= self.update_after_step:
            self.copy_params_from_model_to_ema()
            return
        if due:
            self.update_moving_average(self.ema_model, self.model)
        if self.update_model_with_ema_every is not None and step % self.update_model_with_ema_every == 0:
            self.update_model_with_ema()

    def update_moving_average(
        self, ma_model: nn.Module, current_model: nn.Module, current_decay: float | None = None
    ) -> None:
        """Makes one update of ``ma_model`` by ``current_model``, whichever of the two models they are, or others of the
        same form."""
        if self.is_frozen:
            return
        if self.move_ema_to_online_device and _device(ma_model) != _device(current_model):
            ma_model.to(_device(current_model))
        decay = self.get_current_decay() if current_decay is None else current_decay
        self._bound(ma_model, current_model).update(decay, 1.0 - decay)

    def inplace_copy(self, tgt: torch.Tensor, src: torch.Tensor) -> None:
        """Copies a tensor, for subclasses that have their own update_moving_average(); devices may differ."""
        tgt.copy_(src)

    def inplace_lerp(self, tgt: torch.Tensor, src: torch.Tensor, weight: float) -> None:
        """Interpolates a tensor, for the same subclasses; devices may differ."""
        tgt.lerp_(src.to(tgt.device), weight)

    def copy_params_from_model_to_ema(self) -> None:
        self._bound(self.ema_model, self.model).copy()

    def copy_params_from_ema_to_model(self) -> None:
        self._bound(self.model, self.ema_model).copy()

    def update_model_with_ema(self, decay: float | None = None) -> None:
        """Lets the model go on from its averages, keeping ``decay`` of its weights: from hare to tortoise
        (arXiv:2406.02596)."""
        decay = self.update_model_with_ema_beta if decay is None else decay
        if decay == 0.0:
            self.copy_params_from_ema_to_model()
        else:
            self.update_moving_average(self.model, self.ema_model, decay)

    def _bound(self, module: nn.Module, model: nn.Module) -> GivenMemory | AveragesOfProxy:
        """Returns the follower that brings the tensors of ``module`` to those of ``model``, made anew for other models
        and names."""
        back, names = module is self.model, (self.ignore_names, self.ignore_startswith_names)
        made_for = (module, model, *map(frozenset, (*names, self.param_or_buffer_names_no_ema)))
        if back not in self._followers or self._followers[back][0] != made_for:
            choose = partial(self._fate, called(self.model), back)
            of_proxy = _ModelOfProxy if isinstance(model, SwappedModelProxy) else AveragesOfProxy
            shared = isinstance(module, SwappedModelProxy) or of_proxy is _ModelOfProxy
            if not (shared or back):
                warn_of_rounding(module.parameters(), "Give ema_model= a copy in float32")
            self._followers[back] = made_for, of_proxy(choose) if shared else AveragedCopy("lerp", choose)
        return self._followers[back][1].bind(module, model)

    def _fate(
        self, with_wrappers: Callable[[str], str], back: bool, name: str, tensor: torch.Tensor, kind: Kind
    ) -> Fate:
        """Returns the fate by the name, with or without the names of wrappers. Tensors that are not floating follow the
        model, and are never written ``back``."""
        names = {name, with_wrappers(name)}
        if back and not (tensor.is_floating_point() or tensor.is_complex()):
            return "leave"
        if names & self.ignore_names or any(alias.startswith(tuple(self.ignore_startswith_names)) for alias in names):
            return "hold"
        return "copy" if names & self.param_or_buffer_names_no_ema else "average"

    # ---- state

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Returns state_dict() in fresh CPU tensors, whole also of sharded averages: then collective, on rank 0, clean
        names, {} elsewhere."""
        return whole_averages(self)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self.ema_model is None and any(key.startswith(f"{prefix}ema_model.") for key in state_dict):
            self.init_ema()  # lazy, and there are averages to load
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the followers out: copies pair their models anew."""
        if isinstance(self.ema_model, SwappedModelProxy):
            raise unsupported("averages of a sharded model are kept with it, and cannot be copied; save state_dict()")
        return {**self.__dict__, "_followers": {}}


class _ModelOfProxy(AveragesOfProxy):
    """Lets the model follow the averages of its proxy. Collective where they are divided."""

    def bind(self, module: nn.Module, model: Any) -> AveragesOfProxy:
        return super().bind(model, module)

    @torch.no_grad()
    def update(self, decay: float, weight: float) -> None:
        averages, what = self._averages, "update_model_with_ema()"

        def fill() -> None:
            for row in self._rows["average"]:
                weights, average = row.weights(), row.averages[0]
                weights.copy_(torch.lerp(weights.to(average.dtype), average, weight))
            for row in self._rows["copy"]:
                row.weights().copy_(row.averages[0])

        averages.ready_to_swap(None, what, lambda _: averages.swap.ready(what))
        copies.write(averages, fill)

    def copy(self) -> None:
        """Makes all weights equal to their averages, whatever their fate."""
        copies.feed_back(self._averages, None)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


__all__ = ["EMA"]
