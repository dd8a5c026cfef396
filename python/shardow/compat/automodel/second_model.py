"""ShardedModelEMAManager: the averages are a second model, sharded as the first one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardow.compat._impl.averaged_copy import TrainedCopy
from shardow.compat._impl.swapped_model_proxy import all_ranks, joined, ranks_of, refuse_copies
from shardow.compat.automodel.managed import Managed, checked_decay, look, weights_of
from shardow.files.checkpoint import save as save_file
from shardow.model.groups import group_of_model
from shardow.model.match import compare
from shardow.model.parts import Held, held_by
from shardow.model.view import ModelView, find


class ShardedModelEMAManager(Managed):
    """Averages ``train_model``'s trained parameters in ``ema_model``, a second model sharded alike. Construction is
    collective.

    It begins as the train model, frozen weights and buffers included; buffers follow with each update. Replaced
    parameters of either model are found again by name. A parameter that is unfrozen later is averaged from then on.
    ``ema_model`` keeps its dtype: build it in float32.
    """

    _refusal = RuntimeError

    def __init__(self, ema_model: nn.Module, train_model: nn.Module, decay: float = 0.9999) -> None:
        self.decay = checked_decay(decay)
        self.ema_model, self._train_model = ema_model, train_model
        self._twin = TrainedCopy(ema_model, keeps=True)
        self._ranks = joined("ShardedModelEMAManager", {"decay": self.decay}, group_of_model(train_model, None))
        self._ranks.agree("ShardedModelEMAManager(...)", self._prepare)

    def _prepare(self) -> None:
        _check(find(self.ema_model), find(self._train_model))
        self.ema_model.eval()
        for parameter in self.ema_model.parameters():
            parameter.requires_grad_(False)
        self._twin.bind(self._train_model)
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        """With copies of both models. Raises NotImplementedError where ranks share them."""
        refuse_copies(ranks_of(self._train_model))
        return {name: value for name, value in self.__dict__.items() if name != "_ranks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _ranks=all_ranks())

    @property
    def _tracked_names(self) -> list[str]:
        return list(self._twin.names)

    @property
    def _param_pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(average, weight): the parameters themselves, or FSDP1's memory of them."""
        views = [find(module) for module in (self.ema_model, self._train_model)]
        memory = [{local.name: local.tensor for local in view.parameters} | weights_of(view) for view in views]
        return [(memory[0][name], memory[1][name]) for name in self._twin.names]

    def update(self, model: nn.Module | None = None) -> None:
        """After each optimizer step; ``model``: the train model, or a wrapper of it. Local. What is NaN or Inf is held.
        Raises RuntimeError and ValueError where the models differ in names or shapes; nothing has changed then."""
        self._twin.update(self._train_model if model is None else model, self.decay, 1.0 - self.decay)
        self.updates += 1

    def state_dict(self) -> dict[str, torch.Tensor]:
        """As ema_model.state_dict(), without what wrappers put into names; in pieces where a rank's part is no DTensor.
        Not copies.
        """
        return self._live()

    @contextlib.contextmanager
    def swapped(self) -> Iterator[nn.Module]:
        """``with manager.swapped() as model``: the model to evaluate with averaged weights. Collective where ranks
        share it.
        """
        yield self.ema_model

    def stats(self) -> dict[str, float]:
        """Numbers for a logger: decay, updates, parameters, held_nonfinite."""
        return {
            "decay": self.decay,
            "updates": self.updates,
            "parameters": len(self),
            "held_nonfinite": self._twin.held(),
        }

    def export_safetensors(self, directory: str | Path, dtype: torch.dtype | str | None = None) -> Path:
        """``directory``/ema.safetensors, BAGEL's name for it: the complete averaged model, each rank writing its own
        bytes. Collective.
        """
        path = Path(directory) / "ema.safetensors"
        self._together("export_safetensors()", lambda: path.parent.mkdir(parents=True, exist_ok=True))
        save_file(self.ema_model, path, dtype, group=self._ranks.process_group)
        return path

    def _names(self) -> Mapping[str, object]:
        return self._twin.names

    def _live(self) -> dict[str, torch.Tensor]:
        view = find(self.ema_model)
        view.reshard()
        weights, state = weights_of(view), {}
        for local in [*view.parameters, *view.buffers]:
            tensor = look(weights.get(local.name), local.tensor, local.region)
            state.update(dict.fromkeys((local.name, *local.aliases), tensor))
        return state

    def _held(self) -> Held:
        return held_by(self.ema_model, self._ranks.process_group, saving=False)

    def _begin(self) -> None:
        self._twin.begin(self._train_model)


def _check(ours: ModelView, weights: ModelView) -> None:
    """The origin's exceptions for models that differ."""
    shapes = {local.name: tuple(local.region.shape) for local in ours.parameters}
    trained = {local.name: tuple(local.region.shape) for local in weights.parameters if local.requires_grad}
    fit = compare(trained, {name: shape for name, shape in shapes.items() if name in trained})
    fit.refuse(
        "ShardedModelEMAManager", "the EMA model", KeyError if fit.missing else None, here="in the train model",
        done="no averages were made",
    )  # fmt: skip
