"""NVIDIA-NeMo/Automodel's averages (components/training/ema.py) and the reader of its YAML section, on shardow.EMA and on a second model.

Both average by e.mul_(d).add_(p, alpha=1-d); in float32 that is the origin's result bit for bit. Better: averages are float32 whatever the weights are, nothing is matched by luck or left out in
silence, everything is checked before anything changes, and there are ways out to inference. Names are the unwrapped model's. docs/migration.md has the list.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardow import errors
from shardow.averages.options import Replicas
from shardow.base.checks import invalid, unsupported
from shardow.compat._looks import clone, look, weights_of
from shardow.compat._managed import Managed, Unmatched, checked_decay
from shardow.compat._teams import everybody, joined
from shardow.compat._trained import TrainedTwin
from shardow.ema import EMA
from shardow.files import engine
from shardow.files.checkpoint import save as save_file
from shardow.model.groups import group_of_model
from shardow.model.parts import Held, held_by
from shardow.model.view import ModelView, find
from shardow.ranks.gather import Part
from shardow.ranks.team import Team

logger = logging.getLogger(__name__)

_AGAIN = "freeze it again, or make a new manager and load the old one's state_dict() into it with strict=False"


class EMAManager(Managed):
    """Averages of ``model``'s trainable parameters beside it: plain, DDP, FSDP1, FSDP2, HSDP, TP. Construction is collective.

    The averages are float32, float64 where all the weights are. ``_shadow`` looks as in the origin: DTensors like the weights under FSDP2, whole tensors under DDP; pieces where neither says what
    a rank has (FSDP1, a part of a replica). ``replicas="split"``: ranks that hold the same weights divide the averages among them. ``group``: as in shardow.EMA.
    """

    _refusal = KeyError

    def __init__(
        self, model: nn.Module, decay: float = 0.9999, *, replicas: Replicas = "copy", group: dist.ProcessGroup | None = None
    ) -> None:
        self.decay = checked_decay(decay)
        self._options = {"replicas": replicas, "group": group}
        trained = [p.dtype for p in model.parameters() if p.requires_grad]
        self._dtype = torch.float64 if trained and set(trained) == {torch.float64} else torch.float32
        self._bind(model, self._averages_of(model, "trainable"))
        self._everybody = everybody() if self._is_shared() else joined("EMAManager", {"decay": self.decay})

    def _averages_of(self, model: nn.Module, params: Any) -> EMA:
        options: dict[str, Any] = self._options
        return EMA(model, self.decay, dtype=self._dtype, params=params, rule="mul_add", stochastic=False, **options)

    def _bind(self, model: nn.Module, ema: EMA) -> None:
        self._model, self._ema = model, ema
        weights = weights_of(ema._core.view)
        self._shadow: dict[str, torch.Tensor] = {
            one.name: look(weights.get(one.name), one.averages[0], one.region) for one in ema._core.tracked
        }
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]

    def _is_shared(self) -> bool:
        return self._ema._core.team.process_group is not None

    @property
    def _team(self) -> Team:  # type: ignore[override]
        return self._ema._core.team if self._is_shared() else self._everybody

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """After each optimizer step. Local, unless the model's parameters have been replaced or wrapped otherwise since: they are found by name then, on all ranks together.

        What is NaN or Inf is held. Raises ValueError for a parameter that is trained and has no average.
        """
        if model is not self._model or not self._ema._core.view.unchanged():
            self._follow(model)
        if any(parameter.requires_grad for parameter in self._frozen):
            self._refuse_new(find(model))
        self._ema._core.update_by(self.decay, 1.0 - self.decay)
        self.updates += 1

    def _follow(self, model: nn.Module) -> None:
        view = self._ema._core.view
        self._ema._core.not_swapped("update()")
        view.reshard()
        if model is self._model and view.unchanged():
            return
        theirs = find(model, group=self._options["group"])  # type: ignore[arg-type]
        self._refuse_new(theirs)
        if self._ema._core.follow_moves() and _places(view) == _places(theirs):
            self._model = model
            return
        missing = self._shadow.keys() - {one.name for one in theirs.parameters}
        if missing:
            raise errors.make_also(
                KeyError,
                f"the model has no '{min(missing)}' any more, nor {len(missing) - 1} more of what is averaged; make a new manager of it",
            )
        new = self._averages_of(model, functools.partial(_is_in, frozenset(self._shadow)))
        new._core.load_averages(self._ema._core.averages())
        self._bind(model, new)

    def __getstate__(self) -> dict[str, Any]:
        """With a copy of the model. Raises NotImplementedError where ranks share it."""
        self._ema._core.to_copy("copied")  # raises
        names = ("decay", "updates", "_options", "_dtype", "_model", "_ema")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _everybody=everybody())
        self._bind(self._model, self._ema)

    def _refuse_new(self, view: ModelView) -> None:
        new = [one.name for one in view.parameters if one.requires_grad and one.name not in self._shadow]
        if new:
            raise invalid(
                f"'{new[0]}' and {len(new) - 1} more are trained, but were frozen or not there when the averages were made; {_AGAIN}"
            )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies, by name."""
        return {name: clone(tensor) for name, tensor in self._live().items()}

    @contextlib.contextmanager
    def swapped(self) -> Iterator[nn.Module]:
        with self._ema.swapped():
            yield self._model

    def stats(self) -> dict[str, float]:
        return {**self._ema.stats(), "decay": self.decay, "updates": self.updates}

    def export_safetensors(self, directory: str | Path, dtype: torch.dtype | str | None = None) -> Path:
        path = Path(directory) / "ema.safetensors"

        def prepare() -> tuple[list[Part], dict[str, Any]]:
            path.parent.mkdir(parents=True, exist_ok=True)
            view = self._ema._core.view
            mine = {one.name for one in [*view.parameters, *view.buffers] if one.counts_on(self._team.rank)}
            return [part for part in self._complete()[0] if part.name in mine], engine.dtype_and_limit(dtype, None)

        parts, options = self._together("export_safetensors()", prepare)
        engine.write([engine.FileParts("", parts)], path, self._team, **options)
        return path

    def _names(self) -> Mapping[str, object]:
        return self._shadow

    def _live(self) -> dict[str, torch.Tensor]:
        self._ema._core.not_swapped("state_dict()")
        return self._shadow

    def _held(self) -> Held:
        self._ema._core.not_swapped("loading")
        parts = [Part(one.name, one.averages[0], one.region) for one in self._ema._core.tracked]
        return Held(parts, {one.name: (one.name, *one.local.aliases) for one in self._ema._core.tracked}, self._team.process_group)

    def _begin(self) -> None:
        self._ema._core.ready_to_update()
        self._ema._core.engine.reset()

    def _complete(self) -> tuple[list[Part], dict[str, tuple[str, ...]]]:
        self._ema._core.not_swapped("an export")
        self._ema._core.rebind()
        parts = [Part(one.name, one.averages[0], one.region) for one in self._ema._core.tracked]
        parts += [Part(one.name, one.tensor.detach().reshape(-1), one.region) for one in self._ema._core.others()]
        return parts, {one.name: (one.name, *one.aliases) for one in [*self._ema._core.view.parameters, *self._ema._core.view.buffers]}


class ShardedModelEMAManager(Managed):
    """Averages ``train_model``'s trained parameters in ``ema_model``, a second model sharded alike: FSDP2, FSDP1, plain. Construction is collective.

    It begins as the train model, frozen weights and buffers included; buffers follow with each update. Replaced parameters of either model are found again by name. A parameter that is unfrozen
    later is averaged from then on. ``ema_model`` keeps its dtype: build it in float32, whatever the train model is.
    """

    _refusal = RuntimeError

    def __init__(self, ema_model: nn.Module, train_model: nn.Module, decay: float = 0.9999) -> None:
        self.decay = checked_decay(decay)
        self.ema_model, self._train_model = ema_model, train_model
        self._twin = TrainedTwin(ema_model, keeps=True)
        self._team = joined("ShardedModelEMAManager", {"decay": self.decay}, group_of_model(train_model, None))
        self._team.agree("ShardedModelEMAManager(...)", self._prepare)

    def _prepare(self) -> None:
        _check(find(self.ema_model, strided=True), find(self._train_model, strided=True))
        self.ema_model.eval()
        for parameter in self.ema_model.parameters():
            parameter.requires_grad_(False)
        self._twin.pair(self._train_model)
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        """With copies of both models. Raises NotImplementedError where ranks share them."""
        if group_of_model(self._train_model, None) is not None:
            raise unsupported("averages of a model that ranks share can't be copied or pickled: each has a part. Save them with save()")
        return {name: value for name, value in self.__dict__.items() if name != "_team"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._team = everybody(None)

    @property
    def _tracked_names(self) -> list[str]:
        return list(self._twin.names)

    @property
    def _param_pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(average, weight): the parameters themselves, or FSDP1's memory of them."""
        ours, theirs = (_weights(find(module, strided=True)) for module in (self.ema_model, self._train_model))
        return [(ours[name], theirs[name]) for name in self._twin.names]

    def update(self, model: nn.Module | None = None) -> None:
        """After each optimizer step; ``model``: the train model, or a wrapper of it. Local. What is NaN or Inf is held.

        Raises RuntimeError and ValueError where the models differ in names or shapes; nothing has changed then.
        """
        self._twin.update(self._train_model if model is None else model, self.decay, 1.0 - self.decay)
        self.updates += 1

    def state_dict(self) -> dict[str, torch.Tensor]:
        """As ema_model.state_dict(), without what wrappers put into names; in pieces where a rank's part is no DTensor. Not copies."""
        return self._live()

    @contextlib.contextmanager
    def swapped(self) -> Iterator[nn.Module]:
        yield self.ema_model

    def stats(self) -> dict[str, float]:
        return {"decay": self.decay, "updates": self.updates, "parameters": len(self), "held_nonfinite": self._twin.held()}

    def export_safetensors(self, directory: str | Path, dtype: torch.dtype | str | None = None) -> Path:
        path = Path(directory) / "ema.safetensors"
        self._together("export_safetensors()", lambda: path.parent.mkdir(parents=True, exist_ok=True))
        save_file(self.ema_model, path, dtype, group=self._team.process_group)
        return path

    def _names(self) -> Mapping[str, object]:
        return self._twin.names

    def _live(self) -> dict[str, torch.Tensor]:
        view = find(self.ema_model, strided=True)
        view.reshard()
        weights, found = weights_of(view), {}
        for one in [*view.parameters, *view.buffers]:
            found.update(dict.fromkeys((one.name, *one.aliases), look(weights.get(one.name), one.tensor, one.region)))
        return found

    def _held(self) -> Held:
        return held_by(self.ema_model, self._team.process_group, saving=False)

    def _begin(self) -> None:
        self._twin.begin(self._train_model)

    def _complete(self) -> tuple[list[Part], dict[str, tuple[str, ...]]]:
        held = self._held()
        return held.parts, held.names


def _is_in(names: frozenset[str], name: str, _: object) -> bool:
    return name in names


def _places(view: ModelView) -> dict[str, tuple[int, Any]]:
    return {one.name: (one.tensor.data_ptr(), one.region) for one in view.parameters}


def _weights(view: ModelView) -> dict[str, torch.Tensor]:
    return {**{one.name: one.tensor for one in view.parameters}, **weights_of(view)}


def _check(ours: ModelView, theirs: ModelView) -> None:
    """The origin's exceptions for models that differ."""
    here = {one.name: one for one in ours.parameters}
    trained = [one for one in theirs.parameters if one.requires_grad]
    missing = [one.name for one in trained if one.name not in here]
    if missing:
        raise errors.make_also(KeyError, f"ShardedModelEMAManager: the EMA model lacks parameters of the train model: {missing[:5]}")
    for one in trained:
        shapes = [tuple(local.region.shape) for local in (one, here[one.name])]
        if shapes[0] != shapes[1]:
            raise invalid(f"ShardedModelEMAManager: shapes differ for {one.name}: train={shapes[0]} ema={shapes[1]}")


def build_ema(
    cfg: Any, model: nn.Module, build_ema_model: Callable[[], nn.Module] | None = None, init_mode: str = "auto"
) -> EMAManager | ShardedModelEMAManager | None:
    """The averages that a recipe's ``ema`` section asks for. ``cfg``: that section, a mapping or an object with attributes, or None.

    ``decay``: 0.9999 where it is not said; None (YAML's null), or no section: no averages. ``implementation``: "shadow" is EMAManager, "sharded_model" is ShardedModelEMAManager, "auto" the
    second where ``init_mode`` (the recipe's ``model.init_mode``) is "hf_backbones" and ``model`` is FSDP2's, else the first.
    ``build_ema_model``: builds the second model like the first one, sharded alike.

    Raises ValueError for other keys (a TypeError too), implementations and values.
    """
    section = _section(cfg)
    unknown = section.keys() - {"decay", "implementation"}
    if unknown:
        raise errors.UnknownOptionError(f"ema: unknown option(s) {', '.join(sorted(unknown))}; it has decay and implementation")
    decay, implementation = section.get("decay", 0.9999), section.get("implementation", "auto")
    if cfg is None or decay is None:
        return None
    if implementation not in ("auto", "shadow", "sharded_model"):
        raise invalid(f"Unsupported ema.implementation={implementation!r}; expected 'auto', 'sharded_model', or 'shadow'")
    if implementation == "auto":
        sharded = init_mode == "hf_backbones" and any(isinstance(module, FSDPModule) for module in model.modules())
        implementation = "sharded_model" if sharded else "shadow"
    ema = (
        EMAManager(model, _number(decay))
        if implementation == "shadow"
        else _second_model(model, _number(decay), build_ema_model, init_mode)
    )
    logger.info("EMA enabled with %s implementation, decay=%s, %d params tracked", implementation, decay, len(ema))
    return ema


def _second_model(
    model: nn.Module, decay: float, build_ema_model: Callable[[], nn.Module] | None, init_mode: str
) -> ShardedModelEMAManager:
    if init_mode != "hf_backbones":
        raise invalid("ema.implementation='sharded_model' requires model.init_mode='hf_backbones'; 'shadow' works with any model")
    if build_ema_model is None:
        raise invalid("ema.implementation 'sharded_model' needs build_ema_model=, which builds the second model; 'shadow' needs none")
    return ShardedModelEMAManager(build_ema_model(), model, decay)


def _number(decay: Any) -> float:
    try:
        return checked_decay(float(decay))
    except TypeError:
        raise invalid(f"ema.decay={decay!r} is not a number") from None


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


__all__ = ["EMAManager", "ShardedModelEMAManager", "Unmatched", "build_ema"]
