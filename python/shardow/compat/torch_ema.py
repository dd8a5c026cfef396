"""torch-ema's ExponentialMovingAverage (0.3): the averages of a list of parameters, with store() and restore() around
an evaluation. Names, state and arithmetic, e <- e - (1 - d) (e - p) with d = min(decay, (1 + n) / (10 + n)), are
upstream's, bit for bit.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardow.base.checks import fraction, invalid
from shardow.compat._impl.parameter_list import ParameterList, assign, copies, loaded, moved
from shardow.sharding.fsdp_ownership import resharded

Parameters = Iterable[torch.Tensor] | None


class ExponentialMovingAverage:
    """Averages of all ``parameters``, frozen ones too, held by weak references, so that a dropped model is freed.
    Dropped DTensors are freed by the next call: torch swaps them where a model is moved or cast, and refuses to swap
    weakly referenced tensors.

    ``decay``: in [0, 1]. ``use_num_updates``: the decay begins small, as min(decay, (1 + n) / (10 + n)) in update n.
    Methods take ``parameters`` in place of those of construction. DTensors and FSDP1's shards are averaged as they are;
    nothing is collective.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], decay: float, use_num_updates: bool = True) -> None:
        self.decay = fraction("decay", decay)
        self.num_updates = 0 if use_num_updates else None
        tensors = list(parameters)
        self.shadow_params = copies(tensors)
        self.collected_params: list[torch.Tensor] | None = None
        self._params_refs = [_reference(p) for p in tensors]
        self._listed = ParameterList("difference")

    def update(self, parameters: Parameters = None) -> None:
        """Updates the averages after an optimizer step."""
        tensors = self._resolve(parameters)
        num_updates = None if self.num_updates is None else self.num_updates + 1
        decay = self.decay if num_updates is None else min(self.decay, (1 + num_updates) / (10 + num_updates))
        self._listed.update(self.shadow_params, tensors, decay, 1.0 - decay)
        self.num_updates = num_updates

    def copy_to(self, parameters: Parameters = None) -> None:
        """Copies the averages into the parameters. FSDP's unsharded copies are freed; a backward through the old
        weights raises."""
        assign(self._resolve(parameters), self.shadow_params)

    def store(self, parameters: Parameters = None) -> None:
        """Copies the parameters for restore()."""
        self.collected_params = copies(self._resolve(parameters))

    def restore(self, parameters: Parameters = None) -> None:
        """Copies the stored values into the parameters; they stay stored."""
        if self.collected_params is None:
            raise invalid("restore(): nothing was stored; call store() first", RuntimeError)
        assign(self._resolve(parameters), self.collected_params)

    @contextlib.contextmanager
    def average_parameters(self, parameters: Parameters = None) -> Iterator[None]:
        """Puts the averages into the parameters inside the block; after it, whatever happened, they are what they were.
        Blocks may be nested."""
        tensors, before = resharded(self._resolve(parameters)), self.collected_params
        self.collected_params = weights = copies(tensors)
        try:
            self.copy_to(tensors)
            yield
        finally:
            assign(tensors, weights)
            self.collected_params = before

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        """Moves the averages, and what is stored; the dtype is of floating tensors."""
        self.shadow_params = moved(self.shadow_params, device, dtype)
        if self.collected_params is not None:
            self.collected_params = moved(self.collected_params, device, dtype)

    def state_dict(self) -> dict[str, Any]:
        """Returns its own tensors; of a sharded model this rank's part."""
        return {name: getattr(self, name) for name in ("decay", "num_updates", "shadow_params", "collected_params")}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies a state, in the parameters' devices and dtypes; of whole tensors, sharded ones take their part. What
        does not fit changes nothing."""
        decay, num_updates = fraction("decay", state_dict["decay"]), state_dict["num_updates"]
        if num_updates is not None and not isinstance(num_updates, int):
            raise invalid(f"num_updates is {num_updates!r}; it must be an int or None", AssertionError)
        shadows = self._fitted("shadow_params", state_dict["shadow_params"])
        collected = state_dict["collected_params"]
        if collected is not None:
            if isinstance(collected, list) and len(collected) != len(shadows):
                counts = f"{len(collected)} collected_params and {len(shadows)} shadow_params"
                raise invalid(f"there are {counts}", AssertionError)
            collected = self._fitted("collected_params", collected)
        self.decay, self.num_updates, self.shadow_params, self.collected_params = decay, num_updates, shadows, collected

    def _fitted(self, what: str, tensors: Any) -> list[torch.Tensor]:
        alive, gone = self._alive()
        copied = loaded(what, tensors, self.shadow_params if gone else alive, AssertionError)
        return copied if gone else [t.to(device=p.device, dtype=p.dtype) for t, p in zip(copied, alive, strict=True)]

    def _resolve(self, parameters: Parameters) -> list[torch.Tensor]:
        if parameters is not None:
            return list(parameters)
        alive, gone = self._alive()
        if gone:
            lost = f"{gone} of {len(alive) + gone} parameters are gone with their model"
            raise invalid(f"{lost}; keep it alive, or pass the parameters of another one")
        return alive

    def _alive(self) -> tuple[list[torch.Tensor], int]:
        """Returns the parameters of construction that still exist, and how many do not."""
        alive = [p for p in (ref() for ref in self._params_refs) if p is not None]
        return alive, len(self._params_refs) - len(alive)


class _Held:
    """Holds a parameter until a call finds that no other reference to it is left."""

    __slots__ = ("_one",)

    def __init__(self, parameter: Any) -> None:
        self._one = parameter

    def count(self) -> int:
        return sys.getrefcount(self._one)

    def __call__(self) -> torch.Tensor | None:
        if self.count() <= _ALONE:
            self._one = None
        return self._one  # type: ignore[no-any-return]


_ALONE = _Held(object()).count()


def _reference(parameter: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    swapped = torch.__future__.get_swap_module_params_on_conversion() or is_traceable_wrapper_subclass(parameter)
    return _Held(parameter) if swapped else weakref.ref(parameter)


__all__ = ["ExponentialMovingAverage"]
