"""StandIn: looks like a second model with averaged weights, where a second one cannot be made or would cost too much: the first one, with the averages swapped in while it is called."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shardow import errors as _errors
from shardow.averages.options import Replicas
from shardow.ema import EMA
from shardow.model.owners import has_fsdp


def needed(model: nn.Module, replicas: Replicas) -> bool:
    """True where no second model can be had: FSDP's cannot be copied; ``replicas="split"`` asks to keep a part of the averages on each rank."""
    return replicas == "split" or has_fsdp(model)


class StandIn(nn.Module):
    """A module without parameters of its own, that acts as ``model`` with the averages of ``ema``.

    Calling it is collective, as calling a sharded model is: it swaps the averages in, and out again. state_dict() and load_state_dict() are of the averages, in pieces as this rank has them, under the model's clean names,
    and of the model's buffers. It has its own train() and eval(). Other attributes are the model's, whose weights are not averaged outside of a call: use ``with ema.swapped()`` for them.
    """

    def __init__(self, ema: EMA, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["_ema"], self.__dict__["_model"] = ema, model  # not submodules

    @property
    def ema(self) -> EMA:
        """Whose averages these are."""
        ema: EMA = self.__dict__["_ema"]
        return ema

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Backward through the result raises, since the weights have changed by then."""
        return self.run(self._model, *args, **kwargs)

    def run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A method of the model, with the averages in it and in this module's mode."""
        modes = [(module, module.training) for module in self._model.modules()]
        with self._ema.swapped():
            self._model.train(self.training)
            try:
                return method(*args, **kwargs)
            finally:
                for module, mode in modes:
                    module.training = mode

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        found = OrderedDict() if destination is None else destination
        found.update({prefix + name: tensor for name, tensor in self._entries()})
        return found

    def _entries(self) -> Iterator[tuple[str, torch.Tensor]]:
        averages = self._ema._core.averages()
        yield from averages.items()
        yield from ((one.name, one.tensor.view(one.region.shape)) for one in self._ema._core.view.buffers if one.name not in averages)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing: list[str], unexpected: list[str], errors: list[str]
    ) -> None:
        given = {name[len(prefix) :]: value for name, value in state_dict.items() if name.startswith(prefix)}
        names = self._ema._core.averages()
        missing += [prefix + name for name in names if name not in given]
        unexpected += [prefix + name for name in given if name not in dict(self._entries())]
        self._ema._core.load_averages({**names, **{name: value for name, value in given.items() if name in names}})

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
        yield from ((f"{prefix}.{name}" if prefix else name, tensor) for name, tensor in self._ema._core.averages().items())

    def __getattr__(self, name: str) -> Any:
        raise _errors.make_also(
            AttributeError,
            f"'{name}': this stands in for the averaged model, and can be called, saved and loaded; for anything else enter `with ema.swapped():` and use the model itself",
            "unsupported",
        )
