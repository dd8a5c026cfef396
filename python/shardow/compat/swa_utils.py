"""torch.optim.swa_utils: AveragedModel and the functions around it, for sharded models too. Signatures, keys and
numbers are upstream's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils as upstream
from torch.optim.swa_utils import SWALR
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from shardow.averaging.options import Replicas, Rule
from shardow.base.checks import fraction, invalid
from shardow.compat._impl.averaged_copy import everything
from shardow.compat._impl.given_memory import Fate, Kind, Tensors
from shardow.compat._impl.swapped_model_proxy import Averaged, SwappedModelProxy, follow

AvgFn = Callable[[Tensor, Tensor, "Tensor | int"], Tensor]
MultiAvgFn = Callable[[Any, Any, "Tensor | int"], None]


#: The arithmetic of a function of this module, for the engine: a rule, and n_averaged -> (decay, weight).
_Arithmetic = tuple[Rule, Callable[[Tensor], tuple[float, float]]]
_ATTRIBUTE = "shardow_arithmetic"  # of such a function


def get_ema_multi_avg_fn(decay: float = 0.999) -> MultiAvgFn:
    """Returns a function of lists, torch.lerp(e, p, 1 - decay). Raises ValueError where decay is outside [0, 1]."""
    return _marked(upstream.get_ema_multi_avg_fn(fraction("decay", decay)), "lerp", lambda _: (decay, 1 - decay))


def get_swa_multi_avg_fn() -> MultiAvgFn:
    """Returns a function of lists, torch.lerp(e, p, 1 / (n_averaged + 1)): the mean of all weights, in the engine."""
    return _marked(upstream.get_swa_multi_avg_fn(), "lerp", _of_mean)


def get_ema_avg_fn(decay: float = 0.999) -> AvgFn:
    """Returns a function, decay * e + (1 - decay) * p. Raises ValueError where decay is outside [0, 1]."""
    return _marked(upstream.get_ema_avg_fn(fraction("decay", decay)), "two_products", lambda _: (decay, 1 - decay))


def get_swa_avg_fn() -> AvgFn:
    """Returns a function, e + (p - e) / (n_averaged + 1): the mean of all weights."""
    return _marked(upstream.get_swa_avg_fn(), "quotient", _of_count)


def _of_mean(num_averaged: Tensor) -> tuple[float, float]:
    """Returns the factors as torch rounds them: the reciprocal of an int64 is a float32."""
    weight = float(1 / (num_averaged + 1))
    return 1 - weight, weight


def _of_count(num_averaged: Tensor) -> tuple[float, float]:
    """Returns the factors of "quotient", which divides by the whole number that it finds in the weight."""
    weight = 1 / (int(num_averaged) + 1)
    return 1 - weight, weight


def _marked(
    function: Callable[..., Any], rule: Rule, factors: Callable[[Tensor], tuple[float, float]]
) -> Callable[..., Any]:
    setattr(function, _ATTRIBUTE, (rule, factors))
    return function


_MEAN, _MEAN_OF_ONE = get_swa_multi_avg_fn(), get_swa_avg_fn()


class AveragedModel(Averaged):
    """``module``: a copy of ``model``, averaged by update_parameters(); ``n_averaged``: how often.

    Args:
        device: where the copy lives, by default with the model.
        avg_fn: (average, weight, n_averaged) -> average, called for every tensor.
        multi_avg_fn: (averages, weights, n_averaged) -> None, writes lists of tensors of one device and dtype. By
            default the mean. Those of this module run in the engine; any other is called as torch calls it. Of a
            sharded model it sees this rank's parts, 1-D: element by element.
        use_buffers: buffers are averaged, else copied; integer ones are copied.
        replicas: "split": under DDP each rank keeps a part of the averages; ``module`` is a proxy then, as for FSDP;
            its calls are collective.

    Raises:
        AssertionError: both functions are given.
    """

    n_averaged: Tensor

    def __init__(
        self, model: nn.Module, device: int | torch.device | str | None = None, avg_fn: AvgFn | None = None,
        multi_avg_fn: MultiAvgFn | None = None, use_buffers: bool = False, *, replicas: Replicas = "copy",
    ) -> None:  # fmt: skip
        if avg_fn is not None and multi_avg_fn is not None:
            raise invalid("avg_fn and multi_avg_fn are both given; leave out one", AssertionError)
        arithmetic = _arithmetic_of(multi_avg_fn or avg_fn, model)
        rule = arithmetic[0] if arithmetic is not None else "lerp"
        choose = everything if use_buffers else _parameters
        super().__init__(*follow(model, rule, choose, device=device, replicas=replicas))
        self.avg_fn, self.multi_avg_fn, self.use_buffers, self._rule = avg_fn, multi_avg_fn, use_buffers, rule
        self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long, device=device))

    def update_parameters(self, model: nn.Module) -> None:
        """Updates the averages, the first time by a copy. Raises RuntimeError, before anything changes, where ``model``
        differs in names or shapes."""
        averages = self._follower.bind(self.module, model)
        arithmetic = _arithmetic_of(self.multi_avg_fn or self.avg_fn, model)  # which may be replaced at any time
        if self.n_averaged == 0:
            averages.copy()
        elif arithmetic is not None and arithmetic[0] == self._rule:
            averages.update(*arithmetic[1](self.n_averaged))
        else:
            averages.apply(self._change)
        self.n_averaged += 1

    def _change(self, averages: Tensors, weights: Tensors) -> None:
        """Averages by a function that is not this module's."""
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for place, average in enumerate(averages):
            groups[average.device, average.dtype].append(place)
        for (device, _), places in groups.items():
            targets, sources = ([tensors[place] for place in places] for tensors in (averages, weights))
            count = self.n_averaged.to(device)
            if self.multi_avg_fn is not None:
                self.multi_avg_fn(targets, sources, count)
                continue
            for average, weight in zip(targets, sources, strict=True):
                average.copy_((self.avg_fn or _MEAN_OF_ONE)(average, weight, count))


def _arithmetic_of(function: AvgFn | MultiAvgFn | None, model: nn.Module) -> _Arithmetic | None:
    """Returns the arithmetic of a function of this module; None: it is another's. Without a function torch takes one of
    two, by the device."""
    if function is None:
        device = next((p.device for p in model.parameters()), None)
        in_lists = device is not None and device.type in _get_foreach_kernels_supported_devices()
        function = _MEAN if in_lists else _MEAN_OF_ONE
    return getattr(function, _ATTRIBUTE, None)


def _parameters(name: str, tensor: Tensor, kind: Kind) -> Fate:
    return "average" if kind == "parameter" else "copy"


def update_bn(loader: Iterable[Any], model: nn.Module, device: int | torch.device | None = None) -> None:
    """Computes statistics of BatchNorm layers in one pass over ``loader``, whose batches are tensors or begin with one;
    as in torch.

    Of a sharded AveragedModel the pass is made by the model itself with the averages in it, collectively. Statistics
    and modes that it trains with are restored; its counters of batches do not change.
    """
    proxy = next((module for module in model.modules() if isinstance(module, SwappedModelProxy)), None)
    if proxy is None:
        upstream.update_bn(loader, model, device)
        return
    model = proxy.core.view.model
    # The proxy does not restore these.
    norms = [
        (module, module.momentum) for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    counts = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_floating_point()]
    try:
        proxy.run(upstream.update_bn, loader, model, device)
    finally:
        for norm, momentum in norms:
            norm.momentum = momentum
        for buffer, count in counts:
            buffer.copy_(count)


__all__ = [
    "SWALR", "AveragedModel", "get_ema_avg_fn", "get_ema_multi_avg_fn", "get_swa_avg_fn", "get_swa_multi_avg_fn",
    "update_bn",
]  # fmt: skip
