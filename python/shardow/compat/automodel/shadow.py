"""EMAManager: averages of what is trained, beside the model, on shardow.EMA."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from shardow.averages.options import Replicas
from shardow.base.checks import invalid
from shardow.compat._impl.filling import load_averages
from shardow.compat._impl.swapped_model_proxy import all_ranks, joined
from shardow.compat.automodel.managed import Managed, checked_decay, clone, look, weights_of
from shardow.distributed.rank_group import Step, equal_updates
from shardow.ema import EMA, model_averages
from shardow.files import engine
from shardow.model.parts import Held
from shardow.model.view import ModelView, find

_AGAIN = "freeze it again, or make a new manager and load the old one's state_dict() into it with strict=False"


class EMAManager(Managed):
    """Averages of ``model``'s trainable parameters beside it: plain, DDP, FSDP1, FSDP2, HSDP, TP. Construction is
    collective.

    The averages are float32, float64 where all the weights are; with ``dtype="source"`` they have the weights' dtype,
    one of all, and are rounded as in the origin, which loses most increments of 16-bit ones. ``_shadow`` looks as in
    the origin: DTensors like the weights under FSDP2, whole tensors under DDP; pieces where neither says what a rank
    has (FSDP1, a part of a replica). ``replicas="split"``: ranks that hold the same weights divide the averages among
    them. ``group``: as in shardow.EMA.
    """

    _refusal = KeyError

    def __init__(
        self, model: nn.Module, decay: float = 0.9999, *, replicas: Replicas = "copy",
        group: dist.ProcessGroup | None = None, dtype: Literal["source"] | None = None,
    ) -> None:  # fmt: skip
        self.decay, self._group = checked_decay(decay), group
        trained = {p.dtype for p in model.parameters() if p.requires_grad}
        if dtype is not None and (dtype != "source" or len(trained) > 1):
            raise invalid(f"dtype={dtype!r}: 'source' or None; the weights are of {', '.join(map(str, trained))}")
        own = trained.pop() if dtype or trained == {torch.float64} else torch.float32
        options: dict[str, Any] = {"rule": "mul_add", "stochastic": False, "replicas": replicas, "group": group}
        ema = EMA(model, self.decay, dtype=own, **options)
        is_shared = model_averages(ema).ranks.process_group is not None
        self._everybody = all_ranks() if is_shared else joined("EMAManager", {"decay": self.decay})
        self._bind(model, ema)

    def _bind(self, model: nn.Module, ema: EMA) -> None:
        self._model, self._ema, self._averages = model, ema, model_averages(ema)
        own = self._averages.ranks
        self._ranks = self._everybody if own.process_group is None else own
        weights = weights_of(self._averages.view)
        self._shadow: dict[str, torch.Tensor] = {
            part.name: look(weights.get(part.name), part.flat, part.region) for part in self._averages.parts()
        }
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """After each optimizer step. Local, unless the model's parameters have been replaced or wrapped since: all
        ranks find them by name then. What is NaN or Inf is held. Raises ValueError for a parameter that is trained and
        has no average."""
        if model is not self._model or not self._averages.view.unchanged():
            self._follow(model)
        if any(parameter.requires_grad for parameter in self._frozen):
            self._refuse_new(find(model))
        self._averages.update_by(self.decay, 1.0 - self.decay)
        self.updates += 1

    def _follow(self, model: nn.Module) -> None:
        view = self._averages.view
        self._averages.swap.refuse("update()")
        view.reshard()
        if model is self._model and view.unchanged():
            return
        view_now = find(model, group=self._group)
        self._refuse_new(view_now)
        if self._averages.swap.follow_moves() and _places(view) == _places(view_now):
            self._model = model
            return
        missing = self._shadow.keys() - {local.name for local in view_now.parameters}
        if missing:
            lost = f"'{min(missing)}' any more, nor {len(missing) - 1} more of what is averaged"
            raise invalid(f"the model has no {lost}; make a new manager of it", KeyError)
        asked = {**self._averages.arguments, "params": functools.partial(_is_in, frozenset(self._shadow))}
        new = EMA(model, self.decay, group=self._group, **asked)
        load_averages(model_averages(new), self._averages.averages())
        self._bind(model, new)

    def __getstate__(self) -> dict[str, Any]:
        """With a copy of the model. Raises NotImplementedError where ranks share it."""
        self._averages.to_copy("copied")
        return {name: getattr(self, name) for name in ("decay", "updates", "_group", "_model", "_ema")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _everybody=all_ranks())
        self._bind(self._model, self._ema)

    def _refuse_new(self, view: ModelView) -> None:
        new = [local.name for local in view.parameters if local.requires_grad and local.name not in self._shadow]
        if new:
            raise invalid(
                f"'{new[0]}' and {len(new) - 1} more are trained, but were frozen or absent when averages were made; "
                f"{_AGAIN}"
            )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies, by name."""
        return {name: clone(tensor) for name, tensor in self._live().items()}

    @contextlib.contextmanager
    def swapped(self) -> Iterator[nn.Module]:
        """``with manager.swapped() as model``: the model to evaluate with averaged weights. Collective where ranks
        share it.
        """
        with self._ema.swapped():
            yield self._model

    def stats(self) -> dict[str, float]:
        """Numbers for a logger: decay, updates, parameters, held_nonfinite, and what EMA.stats() adds."""
        return {**self._ema.stats(), "decay": self.decay, "updates": self.updates}

    def export_safetensors(self, directory: str | Path, dtype: torch.dtype | str | None = None) -> Path:
        """``directory``/ema.safetensors, BAGEL's name for it: the complete averaged model, each rank writing its own
        bytes. Collective.
        """
        path = Path(directory) / "ema.safetensors"

        what = "export_safetensors()"

        def find() -> engine.SaveStep:
            path.parent.mkdir(parents=True, exist_ok=True)
            view = self._averages.view
            own = {local.name for local in [*view.parameters, *view.buffers] if local.counts_on(self._ranks.rank)}
            parts = [part for part in self._complete().parts if part.name in own]
            to_save = engine.ToSave([engine.FileParts("", parts)], engine.dtype_and_limit(dtype, None))
            return Step(to_save, [equal_updates(what, self.updates, self._ranks)])

        engine.SaveCall(find, path, self._ranks, what).write()
        return path

    def _names(self) -> Mapping[str, object]:
        return self._shadow

    def _live(self) -> dict[str, torch.Tensor]:
        self._averages.swap.refuse("state_dict()")
        return self._shadow

    def _held(self) -> Held:
        self._averages.swap.refuse("loading")
        return self._averages.held()

    def _begin(self) -> None:
        self._averages.begin()

    def _complete(self) -> Held:
        self._averages.swap.refuse("an export")
        self._averages.swap.rebind()
        return self._averages.held(complete=True)


def _is_in(names: frozenset[str], name: str, _: object) -> bool:
    return name in names


def _places(view: ModelView) -> dict[str, tuple[int, Any]]:
    return {local.name: (local.tensor.data_ptr(), local.region) for local in view.parameters}
