"""Listed: averages of a list of parameters, as a list of tensors, for surfaces that know no names."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardow import _core, _errors
from shardow.compat._pairs import Pair, Pairs


class Listed:
    """Averages ``shadows`` of parameters, list beside list, by ``rule``. A shadow is like its parameter: plain, or sharded as it is (DTensor; FSDP1's local views).

    Both lists come with every update, since their owners may replace them: the same tensors at the same addresses cost a few nanoseconds each, others are paired anew.
    """

    def __init__(self, rule: str, **options: Any) -> None:
        self._rule, self._options = rule, options
        self._shadows: Sequence[torch.Tensor] = ()
        self._parameters: Sequence[torch.Tensor] = ()
        self._bound = False

    @torch.no_grad()
    def update(self, shadows: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], decay: float, weight: float) -> None:
        """Raises ValueError and RuntimeError, before anything changes, where a shadow and its parameter differ in shape."""
        if not (self._bound and _same(shadows, self._shadows) and _same(parameters, self._parameters) and self._watch.addresses_same()):
            self._bind(shadows, parameters)
        self._pairs.update(decay, weight)

    def _bind(self, shadows: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        self._bound = False
        check(shadows, parameters)
        self._pairs = Pairs(
            (Pair(f"parameter {i}", p, e) for i, (e, p) in enumerate(zip(shadows, parameters, strict=True))), self._rule, **self._options
        )
        everything = [*shadows, *parameters]
        sharded, whole = [t for t in everything if hasattr(t, "_local_tensor")], [t for t in everything if not hasattr(t, "_local_tensor")]
        self._watch = _core.Watch([], whole, sharded, torch.Tensor.data_ptr, [])
        self._shadows, self._parameters, self._bound = list(shadows), list(parameters), True


def copies(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Shadows, equal to their parameters."""
    return [parameter.detach().clone() for parameter in parameters]


def check(shadows: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
    """Raises ValueError where the lists differ in length, ValueError and RuntimeError where a shape differs."""
    if len(shadows) != len(parameters):
        raise _errors.make("invalid_argument", f"{len(parameters)} parameters were given; the averages were made of {len(shadows)}")
    for i, (shadow, parameter) in enumerate(zip(shadows, parameters, strict=True)):
        if _shape(shadow) != _shape(parameter):
            raise _errors.make_also(
                RuntimeError,
                f"parameter {i} has shape {_shape(parameter)}, its average {_shape(shadow)}; pass the parameters in the order of construction",
            )


def _shape(tensor: torch.Tensor) -> tuple[object, ...]:
    """The global shape, and where the tensor is sharded the local one."""
    local = getattr(tensor, "_local_tensor", None)
    return tuple(tensor.shape) if local is None else (tuple(tensor.shape), tuple(local.shape))


def _same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))
