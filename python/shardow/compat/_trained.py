"""TrainedTwin: a second model that averages what is trained, by e.mul_(d).add_(p, alpha=1-d). What origins of large models keep beside FSDP's training model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardow.compat._pairs import warn_of_rounding
from shardow.compat._twin import Fate, Kind, Twin
from shardow.model.view import find


class TrainedTwin(Twin):
    """Trained parameters are averaged, persistent buffers copied, the rest is left as it is. What is trained may change from update to update; ``keeps``: a parameter that was trained once is
    averaged for good."""

    def __init__(self, module: nn.Module, keeps: bool) -> None:
        super().__init__(module, "mul_add", self._fate)
        self._keeps = keeps
        self._parameters: list[nn.Parameter] = []
        self._flags: list[bool] = []
        self._warned = False
        self.names: dict[str, None] = {}  # of what is averaged, in the model's order

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_keeps": self._keeps,
            "_parameters": [],
            "_flags": [],
            "_warned": self._warned,
            "names": self.names,
        }

    def begin(self, model: nn.Module) -> None:
        """Everything that both models save becomes the model's: frozen weights and buffers too."""
        Twin(self.module, "mul_add", lambda name, tensor, kind: "leave" if kind == "temporary" else "copy").copy(model)

    def pair(self, model: nn.Module) -> None:
        """What the next update would do first: raises where the models differ."""
        self._bind(model)

    def _unchanged(self) -> bool:
        return [parameter.requires_grad for parameter in self._parameters] == self._flags and super()._unchanged()

    def _pair(self, model: nn.Module) -> None:
        self._model = None  # nothing is known until all is
        view = find(model, strided=True)
        view.reshard()
        self._parameters = list(model.parameters())
        self._flags = [parameter.requires_grad for parameter in self._parameters]
        trained = {one.name: None for one in view.parameters if one.requires_grad or (self._keeps and one.name in self.names)}
        before, self.names = self.names, trained
        try:
            super()._pair(model)
        except BaseException:
            self.names = before
            raise
        averages = (one.tensor for one in self._ours.parameters if one.name in self.names)
        way_out = "Build the averaged model in float32; the trained one may keep its dtype. This warning is given once"
        self._warned = self._warned or warn_of_rounding(averages, way_out, stacklevel=6)

    def _fate(self, name: str, tensor: torch.Tensor, kind: Kind) -> Fate:
        if kind == "parameter":
            return "average" if name in self.names else "leave"
        return "copy" if kind == "buffer" else "leave"
