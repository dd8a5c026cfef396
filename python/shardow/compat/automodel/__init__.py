"""NVIDIA-NeMo/Automodel's averages (components/training/ema.py) and the reader of its YAML section, on shardow.EMA and
on a second model. Both average by e.mul_(d).add_(p, alpha=1-d); in float32 that is the origin's result bit for bit.
Names are the unwrapped model's.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardow import errors
from shardow.averages.options import Replicas
from shardow.base.checks import invalid
from shardow.compat._impl.averaged_copy import TrainedCopy
from shardow.compat._impl.filling import load_averages
from shardow.compat._impl.swapped_model_proxy import all_ranks, joined, ranks_of, refuse_copies
from shardow.compat.automodel.managed import Managed, Unmatched, checked_decay, look, weights_of
from shardow.distributed.rank_group import Step, equal_updates
from shardow.ema import EMA, model_averages
from shardow.files import engine
from shardow.files.checkpoint import save as save_file
from shardow.model.groups import group_of_model
from shardow.model.match import compare
from shardow.model.parts import Held, held_by
from shardow.model.view import ModelView, find

__all__ = ["EMAManager", "ShardedModelEMAManager", "Unmatched", "build_ema"]

logger = logging.getLogger(__name__)
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
        self._frozen = self._averages.view.frozen()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """After each optimizer step. Local, unless the model's parameters have been replaced or wrapped since: all
        ranks find them by name then. What is NaN or Inf is held. Raises ValueError for a parameter that is trained and
        has no average."""
        if model is not self._model or not self._averages.view.unchanged_at_rest():
            self._follow(model)
        self._refuse_new(name for name, parameter in self._frozen if parameter.requires_grad)
        self._averages.update_by(self.decay, 1.0 - self.decay)
        self.updates += 1

    def _follow(self, model: nn.Module) -> None:
        self._averages.swap.refuse("update()")
        view, view_now = self._averages.view, find(model, group=self._group)
        self._refuse_new(local.name for local in view_now.parameters if local.requires_grad)
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

    def _refuse_new(self, trained: Iterable[str]) -> None:
        if new := [name for name in trained if name not in self._shadow]:
            raise invalid(
                f"'{new[0]}' and {len(new) - 1} more are trained, but were frozen or absent when averages were made; "
                f"{_AGAIN}"
            )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies, by name."""
        return {name: tensor.clone() for name, tensor in self._live().items()}

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


def build_ema(
    cfg: Any, model: nn.Module, build_ema_model: Callable[[], nn.Module] | None = None, init_mode: str = "auto"
) -> EMAManager | ShardedModelEMAManager | None:
    """The averages that a recipe's ``ema`` section asks for. ``cfg``: that section, a mapping or an object with
    attributes, or None.

    ``decay``: 0.9999 where it is not said; None (YAML's null), or no section: no averages. ``implementation``: "shadow"
    is EMAManager, "sharded_model" is ShardedModelEMAManager, "auto" the second where ``init_mode`` (the recipe's
    ``model.init_mode``) is "hf_backbones" and ``model`` is FSDP2's, else the first. ``build_ema_model``: builds the
    second model like the first one, sharded alike.

    Raises ValueError for other keys (a TypeError too), implementations and values.
    """
    section = _section(cfg)
    unknown = section.keys() - {"decay", "implementation"}
    if unknown:
        raise errors.UnknownOptionError(
            f"ema: unknown option(s) {', '.join(sorted(unknown))}; it has decay and implementation"
        )
    decay, implementation = section.get("decay", 0.9999), section.get("implementation", "auto")
    if cfg is None or decay is None:
        return None
    if implementation not in ("auto", "shadow", "sharded_model"):
        raise invalid(
            f"Unsupported ema.implementation={implementation!r}; expected 'auto', 'sharded_model', or 'shadow'"
        )
    if implementation == "auto":
        sharded = init_mode == "hf_backbones" and any(isinstance(module, FSDPModule) for module in model.modules())
        implementation = "sharded_model" if sharded else "shadow"
    try:
        number = checked_decay(float(decay))
    except TypeError:
        raise invalid(f"ema.decay={decay!r} is not a number") from None
    ema: EMAManager | ShardedModelEMAManager
    if implementation == "shadow":
        ema = EMAManager(model, number)
    elif init_mode != "hf_backbones":
        raise invalid("ema.implementation='sharded_model' requires model.init_mode='hf_backbones'; 'shadow' does not")
    elif build_ema_model is None:
        raise invalid("ema.implementation='sharded_model' needs build_ema_model=; 'shadow' needs none")
    else:
        ema = ShardedModelEMAManager(build_ema_model(), model, number)
    logger.info("EMA enabled with %s implementation, decay=%s, %d params tracked", implementation, decay, len(ema))
    return ema


def _section(cfg: Any) -> dict[str, Any]:
    if cfg is None:
        return {}
    if isinstance(cfg, Mapping):
        return {str(key): value for key, value in cfg.items()}
    if callable(getattr(cfg, "to_dict", None)):
        return dict(cfg.to_dict())
    if hasattr(cfg, "__dict__"):
        return {key: value for key, value in vars(cfg).items() if not key.startswith("_")}
    raise invalid(f"ema is a {type(cfg).__name__}; a section with decay and implementation is needed, or null")
