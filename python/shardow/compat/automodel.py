"""NVIDIA-NeMo/Automodel's averages (components/training/ema.py) and the reader of its YAML section, on shardow.EMA and
on a second model. Both average by e.mul_(d).add_(p, alpha=1-d), in float32 with upstream's result bit for bit.
Names are the unwrapped model's. A checkpoint is a directory of torch.distributed.checkpoint: {"<name>": tensor},
sharded, and beside it the decay and the number of updates.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardow import _core, errors
from shardow.averaging.options import Replicas
from shardow.base.checks import invalid, warn
from shardow.compat._impl import files
from shardow.compat._impl.averaged_copy import AveragedCopy, TrainedCopy
from shardow.compat._impl.swapped_model_proxy import all_ranks, fill, joined, load_averages, ranks_of, refuse_copies
from shardow.distributed.rank_group import RankGroup, Step, equal_updates
from shardow.ema import EMA, model_averages
from shardow.files.checkpoint import save as save_file
from shardow.sharding.dtensor import sharded_like
from shardow.sharding.dtypes import floating
from shardow.sharding.groups import group_of_model
from shardow.sharding.local import LocalTensor
from shardow.sharding.local_state import LocalState, Saveable, held_by
from shardow.sharding.match import Fit, Form, compare, fit
from shardow.sharding.names import clean_file_key
from shardow.sharding.partial_tensor import PartialTensor
from shardow.sharding.view import ModelView, find

__all__ = ["EMAManager", "ShardedModelEMAManager", "Unmatched", "build_ema"]

logger = logging.getLogger(__name__)
T = TypeVar("T")
_DECAY, _UPDATES = "shardow.decay", "shardow.updates"


class Unmatched(NamedTuple):
    """Names that did not match, as torch's load_state_dict() returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Managed(ABC):
    """Base of both managers. ``decay`` may be changed between updates. ``updates``: how many there have been; save()
    keeps both beside the averages."""

    use_distributed_checkpointing = True
    decay: float
    updates = 0
    _ranks: RankGroup
    _refusal: type[Exception]  # upstream's error for names that don't match
    _names: Mapping[str, object]  # of the averages

    @abstractmethod
    def _live(self) -> dict[str, torch.Tensor]:
        """Returns everything that state_dict() has, in its own memory."""

    @abstractmethod
    def _held(self) -> LocalState:
        """Returns the same as this rank's memory, each tensor once."""

    @abstractmethod
    def _begin(self) -> None:
        """Makes the averages equal to the weights."""

    @abstractmethod
    def _saveable(self) -> Saveable:
        """Returns the averaged model, as files take it."""

    def _complete(self) -> LocalState:
        """Returns everything that an averaged model saves."""
        return self._held()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return not {name, clean_file_key(name)}.isdisjoint(self._names)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> Unmatched:
        """Loads full tensors, DTensors or pieces of the same sharding, of any floating dtype. Collective where ranks
        share the model.

        Everything is checked on every rank first. Names that don't match raise; without ``strict`` they are returned,
        with a warning.

        Raises:
            KeyError (EMAManager), RuntimeError (ShardedModelEMAManager): names. RuntimeError: the rest. All are
            ValueErrors.
        """

        what, hint = f"{type(self).__name__}.load_state_dict()", "strict=False leaves these as they are"
        return _unmatched(fill(what, self._ranks, self._held, state, self._refusal, strict, hint), "the state")

    def save(self, directory: str | Path) -> None:
        """Writes a torch.distributed.checkpoint directory like upstream's ``ema/``, with decay and updates; upstream
        reads it. Collective. It is published by one rename, and torch's cache of save plans, which other objects' saves
        may use, is left alone."""
        entries = {**self._together("save()", self._live), **_counters(self.decay, self.updates)}

        def write(partial: Path) -> None:
            with _quiet_alone():
                dcp_save(entries, checkpoint_id=str(partial), process_group=self._ranks.process_group)

        files.publish("save()", Path(directory), self._ranks, write)

    @torch.no_grad()
    def load(self, directory: str | Path, missing: str = "error") -> Unmatched:
        """Loads what save() or upstream's Checkpointer wrote, at any world size. Collective. Everything is checked
        first.

        ``missing``: where the directory or some averages are missing, as when averaging is turned on in the middle of a
        training: "error", or "init": they begin as copies of the weights. The decay stays as it is; a different decay
        in the directory gives a warning.
        """
        if missing not in ("error", "init"):
            begin = "averages that are not in the checkpoint begin as the weights are now"
            raise invalid(f"missing={missing!r}; 'error', or 'init': {begin}")
        compared, counters = self._ranks.agree("load()", lambda: self._compare(Path(directory), missing))
        if compared.missing:
            self._begin()
        live = self._live()
        entries = {**{key: live[name] for name, key in compared.keys.items()}, **counters}
        if entries:
            with _quiet_alone():
                dcp_load(entries, checkpoint_id=str(directory), process_group=self._ranks.process_group)
        self._held().put_back()
        self.updates = int(counters.get(_UPDATES, 0))
        decay = float(counters.get(_DECAY, self.decay))
        if decay != self.decay:
            warn(f"{directory} was averaged with decay {decay}; it goes on with {self.decay}")
        return _unmatched(compared, str(directory))

    def _compare(self, directory: Path, missing: str) -> tuple[Fit[Form | None], dict[str, torch.Tensor]]:
        """Returns how the directory fits, and tensors for the counters that it has. Changes nothing."""
        stored, way_out = {}, "load(..., missing='init') begins them as the weights are now"
        if (directory / ".metadata").exists():
            stored = FileSystemReader(str(directory)).read_metadata().state_dict_metadata
        elif missing == "error":
            raise errors.make("not_found", f"{directory} is no checkpoint of averages; {way_out}")
        counters = _counters(0.0, 0)
        forms = {
            key: Form(tuple(entry.size), entry.properties.dtype)
            for key, entry in stored.items()
            if isinstance(entry, TensorStorageMetadata) and key not in counters
        }
        compared = fit(self._held(), forms, str(directory))
        compared.only_different().refuse("load()", str(directory), RuntimeError)
        if missing == "error" and compared.missing:
            compared.refuse("load()", str(directory), KeyError, hint=way_out)
        return compared, counters if counters.keys() <= stored.keys() else {}

    def export_safetensors(self, directory: str | Path, dtype: torch.dtype | str | None = None) -> Path:
        """Writes the complete averaged model into ``directory``/ema.safetensors, BAGEL's name for it, each rank its own
        bytes. Collective."""
        path = Path(directory) / "ema.safetensors"
        save_file(self._together("export_safetensors()", self._saveable), path, dtype, group=self._ranks.process_group)
        return path

    def export_shadow(self, directory: str | Path, dtype: torch.dtype | str | None = None) -> Path:
        """Writes ``directory``/ema_shadow.pt, which examples/diffusion/generate/generate.py looks for first: a whole
        state dict for load_state_dict(strict=True). Rank 0 writes it, and holds one tensor at a time: they lie in files
        beside it meanwhile. Collective. ``dtype``: of floating tensors."""
        held, kind = self._together("export_shadow()", lambda: (self._complete(), floating(dtype)))
        path = Path(directory) / "ema_shadow.pt"
        files.write_gathered("export_shadow()", path, held, self._ranks, kind)
        return path

    def _together(self, what: str, fn: Callable[[], T]) -> T:
        """Calls fn() on every rank before the averages of all are used. An error on one rank is an error on all; so are
        fewer updates on one rank."""
        return self._ranks.step(what, lambda: Step(fn(), [equal_updates(what, self.updates, self._ranks)]))


_AGAIN = "freeze it again, or make a new manager and load the old one's state_dict() into it with strict=False"


class EMAManager(Managed):
    """Averages of the trainable parameters of ``model``: plain, DDP, FSDP1, FSDP2, HSDP, TP. Construction is
    collective.

    The averages are float32, float64 where all the weights are; with ``dtype="source"`` they have the weights' dtype,
    one of all, and are rounded as in upstream, which loses most increments of 16-bit ones. ``_shadow`` looks as in
    upstream: DTensors like the weights under FSDP2, whole tensors under DDP; pieces where neither can show a rank's
    part (FSDP1, a part of a replica). ``replicas="split"``: ranks that hold the same weights divide the averages among
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
        if model_averages(ema).ranks.process_group is None:
            self._ranks = joined("EMAManager", {"decay": self.decay})
        self._bind(model, ema)

    def _bind(self, model: nn.Module, ema: EMA) -> None:
        self._model, self._ema, self._averages = model, ema, model_averages(ema)
        if self._averages.ranks.process_group is not None:
            self._ranks = self._averages.ranks
        rows = self._averages.tracked
        self._shadow = {row.name: like_weight(row.local, row.averages[0], row.region) for row in rows}
        self._names = self._shadow
        self._frozen = self._averages.view.frozen()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Updates the averages after an optimizer step. Local, unless the model's parameters have been replaced or
        wrapped since: all ranks find them by name then. NaN and Inf are held. Raises ValueError for a parameter
        that is trained and has no average."""
        if model is not self._model or not self._averages.view.unchanged_at_rest():
            self._follow(model)
        self._refuse_new(name for name, parameter in self._frozen if parameter.requires_grad)
        self._averages.update_by(self.decay, 1.0 - self.decay)
        self.updates += 1

    def _follow(self, model: nn.Module) -> None:
        self._averages.swap.refuse("update()")
        view, new_view = self._averages.view, find(model, group=self._group)
        self._refuse_new(local.name for local in new_view.parameters if local.requires_grad)
        if self._averages.swap.follow_moves() is None and _places(view) == _places(new_view):
            self._model = model
            return
        present = {local.name: None for local in new_view.parameters if local.name in self._shadow}
        compare(dict.fromkeys(self._shadow), present).refuse(
            "update()", "the model", KeyError, done="nothing was averaged", hint="Make a new manager of it"
        )
        options = {**self._averages.arguments, "params": functools.partial(_is_in, frozenset(self._shadow))}
        new = EMA(model, self.decay, group=self._group, **options)
        load_averages(model_averages(new), self._averages.averages())
        self._bind(model, new)

    def __getstate__(self) -> dict[str, Any]:
        """Returns a state that includes the model. Raises NotImplementedError where ranks share it."""
        self._averages.to_copy("copied")
        return {name: getattr(self, name) for name in ("decay", "updates", "_group", "_model", "_ema")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _ranks=all_ranks())
        self._bind(self._model, self._ema)

    def _refuse_new(self, trained: Iterable[str]) -> None:
        if new := [name for name in trained if name not in self._shadow]:
            made = "but were frozen or absent when averages were made"
            raise invalid(f"'{new[0]}' and {len(new) - 1} more are trained, {made}; {_AGAIN}")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns copies, by name."""
        return {name: tensor.clone() for name, tensor in self._live().items()}

    @contextlib.contextmanager
    def swapped(self) -> Iterator[nn.Module]:
        """Gives the model to evaluate, with averaged weights: ``with manager.swapped() as model``. Collective where
        ranks share it."""
        with self._ema.swapped():
            yield self._model

    def stats(self) -> dict[str, float]:
        """Returns numbers for a logger: decay, updates, parameters, held_nonfinite, and what EMA.stats() adds."""
        return {**self._ema.stats(), "decay": self.decay, "updates": self.updates}

    def _live(self) -> dict[str, torch.Tensor]:
        self._averages.swap.refuse("state_dict()")
        return self._shadow

    def _held(self) -> LocalState:
        self._averages.swap.refuse("loading")
        return self._averages.held()

    def _begin(self) -> None:
        self._averages.begin()

    def _complete(self) -> LocalState:
        self._averages.swap.refuse("an export")
        self._averages.swap.rebind()
        return self._averages.held(complete=True)

    def _saveable(self) -> Saveable:
        return {part.name: PartialTensor(part.flat, part.region) for part in self._complete().parts}


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
        self._twin = TrainedCopy(keeps=True)
        self._names = self._twin.names
        self._ranks = joined("ShardedModelEMAManager", {"decay": self.decay}, group_of_model(train_model, None))
        self._ranks.agree("ShardedModelEMAManager(...)", self._prepare)

    def _prepare(self) -> None:
        self.ema_model.eval()
        for parameter in self.ema_model.parameters():
            parameter.requires_grad_(False)
        self._twin.bind(self.ema_model, self._train_model)
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        """Returns a state that includes both models. Raises NotImplementedError where ranks share them."""
        refuse_copies(ranks_of(self._train_model))
        return {name: value for name, value in self.__dict__.items() if name != "_ranks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _ranks=all_ranks())

    def update(self, model: nn.Module | None = None) -> None:
        """Updates the averages after an optimizer step; ``model``: the train model, or a wrapper of it. Local. NaN and
        Inf are held. Raises RuntimeError and ValueError where the models differ in names or shapes; nothing has
        changed then."""
        averages = self._twin.bind(self.ema_model, self._train_model if model is None else model)
        averages.update(self.decay, 1.0 - self.decay)
        self.updates += 1

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns ema_model.state_dict(), without what wrappers put into names; in pieces where a rank's part is no
        DTensor. Not copies."""
        return self._live()

    def swapped(self) -> contextlib.AbstractContextManager[nn.Module]:
        """Gives the model to evaluate, with averaged weights: ``with manager.swapped() as model``. Collective where
        ranks share it."""
        return contextlib.nullcontext(self.ema_model)

    def stats(self) -> dict[str, float]:
        """Returns numbers for a logger: decay, updates, parameters, held_nonfinite."""
        return {
            "decay": self.decay,
            "updates": self.updates,
            "parameters": len(self),
            "held_nonfinite": self._twin.held(),
        }

    def _live(self) -> dict[str, torch.Tensor]:
        view = find(self.ema_model)
        view.reshard()
        state: dict[str, torch.Tensor] = {}
        for local in [*view.parameters, *view.buffers]:
            shown = like_weight(local, local.tensor, local.region)
            state.update(dict.fromkeys((local.name, *local.aliases), shown))
        return state

    def _held(self) -> LocalState:
        return held_by(self.ema_model, self._ranks.process_group, saving=False)

    def _begin(self) -> None:
        AveragedCopy("mul_add").bind(self.ema_model, self._train_model).copy()

    def _saveable(self) -> Saveable:
        return self.ema_model


def build_ema(
    cfg: Any, model: nn.Module, build_ema_model: Callable[[], nn.Module] | None = None, init_mode: str = "auto"
) -> EMAManager | ShardedModelEMAManager | None:
    """Makes the averages that a recipe's ``ema`` section asks for. ``cfg``: that section, a mapping or an object with
    attributes, or None.

    ``decay``: by default 0.9999; None (YAML's null), or no section: no averages. ``implementation``: "shadow" is
    EMAManager, "sharded_model" is ShardedModelEMAManager, "auto" the second where ``init_mode`` (the recipe's
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


def _counters(decay: float, updates: int) -> dict[str, torch.Tensor]:
    """Returns the counters that a directory has beside the averages."""
    numbers = {_DECAY: (decay, torch.float64), _UPDATES: (updates, torch.int64)}
    return {key: torch.tensor(number, dtype=dtype, device="cpu") for key, (number, dtype) in numbers.items()}


@contextlib.contextmanager
def _quiet_alone() -> Iterator[None]:
    """Silences torch's warning at each save and load of a process without a group: one process is no mistake here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def checked_decay(decay: float) -> float:
    if not 0.0 <= decay <= 1.0:
        raise invalid(f"decay must be in [0, 1], got {decay}")
    return float(decay)


def _unmatched(fit: Fit[Form | None], where: str) -> Unmatched:
    """Returns the names that don't match, with a warning where there are any."""
    if text := fit.text(where):
        warn(f"not everything was loaded: {text}; missing averages are as they were, or as the weights")
    return Unmatched(fit.missing, fit.unexpected)


def like_weight(local: LocalTensor, memory: torch.Tensor, region: _core.Region) -> torch.Tensor:
    """Returns ``memory``, the elements of ``region`` in its order, in the form that a module shows for ``local``; where
    that cannot be, whole or as a PartialTensor. The result shares the memory."""
    weight = local.shown if local.hidden is None else None
    if isinstance(weight, DTensor) and weight._local_tensor.numel() == region.size and _torch_fits(weight, region):
        return sharded_like(weight, memory.view(weight._local_tensor.shape))
    if region == _core.Region.whole(list(region.shape)):
        return memory.view(region.shape)
    return PartialTensor(memory.reshape(-1), region)


def _torch_fits(tensor: Any, region: _core.Region) -> bool:
    """Returns whether torch's record of this rank's elements, which checkpoints go by, is ``region``: for uneven TP +
    FSDP2 not every version's is right."""
    chunks = [chunk for chunk in tensor.__create_chunk_list__() if chunk.sizes.numel()]
    boxes = [(list(offsets), list(sizes)) for offsets, sizes, _ in region.boxes()]
    return boxes == [(list(chunk.offsets), list(chunk.sizes)) for chunk in chunks]
