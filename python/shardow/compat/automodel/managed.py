"""Managed: what the averages of NeMo Automodel have in common: checked states, checkpoint directories, files for
inference. A directory is torch.distributed.checkpoint's: {"<name>": tensor}, sharded, and beside it the decay and the
number of updates.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from shardow import _core, errors
from shardow.base.checks import invalid, warn
from shardow.compat._impl import files
from shardow.compat._impl.filling import fill
from shardow.distributed.rank_group import RankGroup, Step, equal_updates
from shardow.model.dtensor import sharded_like
from shardow.model.dtypes import floating
from shardow.model.match import Fit, Form, fit
from shardow.model.names import clean_file_key
from shardow.model.parts import Held
from shardow.model.piece import Piece
from shardow.model.view import ModelView

T = TypeVar("T")
_DECAY, _UPDATES = "shardow.decay", "shardow.updates"


class Unmatched(NamedTuple):
    """As torch's load_state_dict() returns it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Managed(ABC):
    """``decay`` may be changed between updates. ``updates``: how many there have been; save() keeps both beside the
    averages.
    """

    use_distributed_checkpointing = True
    decay: float
    updates = 0
    _ranks: RankGroup
    _refusal: type[Exception]  # what the origin raises for names that don't match

    @abstractmethod
    def _names(self) -> Mapping[str, object]:
        """Of what is averaged."""

    @abstractmethod
    def _live(self) -> dict[str, torch.Tensor]:
        """Everything that state_dict() has, in its own memory."""

    @abstractmethod
    def _held(self) -> Held:
        """The same as this rank's memory, each tensor once."""

    @abstractmethod
    def _begin(self) -> None:
        """The averages become the weights."""

    def _complete(self) -> Held:
        """Everything that an averaged model saves."""
        return self._held()

    def __len__(self) -> int:
        return len(self._names())

    def __contains__(self, name: str) -> bool:
        names = self._names()
        return name in names or clean_file_key(name) in names

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> Unmatched:
        """Full tensors, DTensors or pieces of the same sharding, of any floating dtype. Collective where ranks share
        the model.

        Everything is checked on every rank first. Names that don't match raise; without ``strict`` they are returned,
        with a warning.

        Raises:
            KeyError (EMAManager), RuntimeError (ShardedModelEMAManager): names. RuntimeError: the rest. All are
            ValueErrors.
        """

        what = f"{type(self).__name__}.load_state_dict()"

        def refuse(fit: Fit[Form | None]) -> None:
            if strict:
                names = replace(fit, different=[], elsewhere=[])
                names.refuse(what, "the state", self._refusal, hint="strict=False leaves these as they are")
            fit.only_different().refuse(what, "the state", RuntimeError)

        return _unmatched(fill(what, self._ranks, self._held, state, refuse), "the state")

    def save(self, directory: str | Path) -> None:
        """A torch.distributed.checkpoint directory like the origin's ``ema/``, with decay and updates; the origin reads
        it. Collective. It is published by one rename, and torch's cache of save plans, which other objects' saves may
        use, is left alone.
        """
        path = Path(directory)
        entries = {**self._together("save()", self._live), **_counters(self.decay, self.updates)}

        def write(partial: Path) -> None:
            with _quiet_alone():
                dcp_save(entries, checkpoint_id=str(partial), process_group=self._ranks.process_group)

        files.publish("save()", path, path.with_name(f".{path.name}.partial"), self._ranks, write)

    @torch.no_grad()
    def load(self, directory: str | Path, missing: str = "error") -> Unmatched:
        """What save() or the origin's Checkpointer wrote, at any world size. Collective. Everything is checked first.

        ``missing``: where the directory or some averages are not there, as when averaging is turned on in the middle of
        a training: "error", or "init": they begin as the weights are now. The decay stays what it is; another one there
        is warned of.
        """
        if missing not in ("error", "init"):
            raise invalid(
                f"missing={missing!r}; 'error', or 'init': averages that are not in the checkpoint begin as the "
                "weights are now"
            )
        found, counters = self._ranks.agree("load()", lambda: self._compared(Path(directory), missing))
        if found.missing:
            self._begin()
        live = self._live()
        entries = {**{key: live[name] for name, key in found.keys.items()}, **counters}
        if entries:
            with _quiet_alone():
                dcp_load(entries, checkpoint_id=str(directory), process_group=self._ranks.process_group)
        self._held().put_back()
        self.updates = int(counters.get(_UPDATES, 0))
        decay = float(counters.get(_DECAY, self.decay))
        if decay != self.decay:
            warn(f"{directory} was averaged with decay {decay}; it goes on with {self.decay}")
        return _unmatched(found, str(directory))

    def _compared(self, directory: Path, missing: str) -> tuple[Fit[Form | None], dict[str, torch.Tensor]]:
        """Returns how the directory fits, and room for the counters that it has. Changes nothing."""
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
        found = fit(self._held(), forms, str(directory))
        found.only_different().refuse("load()", str(directory), RuntimeError)
        if missing == "error" and found.missing:
            found.refuse("load()", str(directory), KeyError, hint=way_out)
        return found, counters if counters.keys() <= stored.keys() else {}

    def export_shadow(self, directory: str | Path, dtype: torch.dtype | str | None = None) -> Path:
        """``directory``/ema_shadow.pt, which examples/diffusion/generate/generate.py looks for first: a whole state
        dict for load_state_dict(strict=True). Rank 0 writes it, and holds one tensor at a time. Collective. ``dtype``:
        of floating tensors.
        """
        held, kind = self._together("export_shadow()", lambda: (self._complete(), floating(dtype)))
        path = Path(directory) / "ema_shadow.pt"
        files.write_gathered("export_shadow()", path, held, self._ranks, kind)
        return path

    def _together(self, what: str, fn: Callable[[], T]) -> T:
        """fn() on every rank before the averages of all are used, or an error on all: also where some have made fewer
        updates.
        """
        return self._ranks.step(what, lambda: Step(fn(), [equal_updates(what, self.updates, self._ranks)]))


def _counters(decay: float, updates: int) -> dict[str, torch.Tensor]:
    """Returns what a directory has beside the averages."""
    numbers = {_DECAY: (decay, torch.float64), _UPDATES: (updates, torch.int64)}
    return {key: torch.tensor(number, dtype=dtype, device="cpu") for key, (number, dtype) in numbers.items()}


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """Torch warns at each save and load of a process without a group; one process is no mistake here."""
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


def weights_of(view: ModelView) -> dict[str, torch.Tensor]:
    """The modules' own parameters and buffers, by the names of view.parameters and view.buffers. FSDP1's have none."""
    return {local.name: local.shown for local in [*view.parameters, *view.buffers] if local.hidden is None}


def look(weight: torch.Tensor | None, memory: torch.Tensor, region: _core.Region) -> torch.Tensor:
    """``memory``: the elements of ``region``, in its order. The result shares it. ``weight``: what it is to look
    like."""
    if isinstance(weight, DTensor) and weight._local_tensor.numel() == region.size and _torch_says(weight, region):
        return sharded_like(weight, memory.view(weight._local_tensor.shape))
    if region == _core.Region.whole(list(region.shape)):
        return memory.view(region.shape)
    return Piece(memory.reshape(-1), region)


def _torch_says(tensor: Any, region: _core.Region) -> bool:
    """Torch's own idea of what this rank holds, which checkpoints go by, is right: for uneven TP + FSDP2 not every
    version's is.
    """
    chunks = [chunk for chunk in tensor.__create_chunk_list__() if chunk.sizes.numel()]
    boxes = [(list(offsets), list(sizes)) for offsets, sizes, _ in region.boxes()]
    return boxes == [(list(chunk.offsets), list(chunk.sizes)) for chunk in chunks]
