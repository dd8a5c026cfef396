"""Tensors in safetensors files, by the file engine: each rank writes and reads its own bytes."""

from __future__ import annotations

import contextlib
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardow import _core, errors
from shardow.base.checks import instance, invalid, unsupported, utf8, whole
from shardow.base.progress import Progress, shown
from shardow.distributed.abandonable_thread import keep_one
from shardow.distributed.gather import LocalShard
from shardow.distributed.rank_group import Comparison, RankGroup, Step, naming
from shardow.distributed.store_group import store_group
from shardow.files import paths
from shardow.files.background import CHANNEL, SaveHandle, finish, settle, start
from shardow.files.claims import Claim
from shardow.files.paths import StrPath
from shardow.sharding import dtypes
from shardow.sharding.extra_state import for_file
from shardow.sharding.storage import engine_view

_UNITS = {"": 1, "B": 1} | {f"{unit}{b}": base**k for base, b in ((10**3, "B"), (2**10, "IB"))
                            for k, unit in enumerate("KMGT", 1)}  # fmt: skip


@dataclass
class FileParts:
    """What this rank holds of one file. ``name`` is empty where the engine names files as Hugging Face does."""

    name: str
    parts: Sequence[LocalShard]
    metadata: Mapping[str, str] = field(default_factory=dict)


def with_extra(name: str, parts: list[LocalShard], extra: Mapping[str, Any], metadata: Mapping[str, str]) -> FileParts:
    """A file of ``parts``, with a module's extra states, which are rank 0's; elsewhere ``extra`` is empty."""
    more, texts = for_file(extra)
    return FileParts(name, [*parts, *more], {**texts, **metadata})


def in_dtypes(
    parts: Sequence[LocalShard], own: Mapping[str, torch.dtype], wanted: torch.dtype | None
) -> tuple[list[LocalShard], str | None]:
    """(parts, the dtype to which the engine casts): so that floating tensors end up as ``wanted``, or each as its
    ``own``, by name. ``own`` has every name, on all ranks alike. The engine knows one dtype for all, of 16 bits or
    more; for others parts are copied.
    """
    targets = {name: wanted or dtype for name, dtype in own.items() if dtype.is_floating_point}
    different = set(targets.values())
    if len(different) == 1 and next(iter(different)).itemsize > 1:
        return list(parts), dtypes.NAMES[different.pop()]
    return [part._replace(flat=part.flat.to(targets.get(part.name, part.flat.dtype))) for part in parts], None


@contextlib.contextmanager
def several_said(*checkpoints: StrPath) -> Iterator[None]:
    """A path that is no checkpoint, but a directory of several: the error says so."""
    try:
        yield
    except errors.InvalidArgumentError:
        for where in map(paths.to_read, checkpoints):
            if several := _core.ema_files_in(where):
                one_of_them = f"give the file of one of them: {', '.join(several.values())}"
                raise invalid(f"{where} is a saved EMA of decays {', '.join(several)}; {one_of_them}") from None
        raise


@dataclass
class ToSave:
    """Holds this rank's part of each file and the engine's options. ``texts()``: more metadata of each file, once ranks
    have compared what they hold; none where it returns nothing."""

    files: Sequence[FileParts]
    options: dict[str, Any]
    texts: Callable[[], Sequence[Mapping[str, str]]] = tuple


SaveStep = Step[ToSave]
Find = Callable[[], SaveStep]


class SaveCall:
    """A save of what ``find()`` returns, which may raise on one rank for all, as comparisons may. ``committed()`` is
    called on rank 0 when all is published."""

    def __init__(
        self, find: Find, path: StrPath, ranks: RankGroup, what: str = "save()", progress: Progress | None = None,
        committed: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        settle(ranks.process_group)
        self._find, self._path, self._ranks, self._progress, self._what = find, path, ranks, progress, what
        self._committed = committed if ranks.rank == 0 else None
        self._claim: Claim | None = None
        self._memory: list[list[LocalShard]] = []  # that the engine reads: until the save is written or staged
        self._target = ""

    def write(self) -> dict[str, Any]:
        """Collective."""
        return finish(self._open(self._ranks.group), self._path, self._committed)

    def write_in_background(self) -> SaveHandle:
        """Does what write() does, and returns when everything is copied. Collective, the rest in the background too."""
        process_group = self._ranks.process_group
        save = self._open(_core.solo() if process_group is None else store_group(process_group, CHANNEL))
        if self._ranks.size > 1:
            keep_one()
        return start(process_group, save, self._target, self._committed)

    def _open(self, group: _core.Group) -> _core.Save:
        """Makes the first round, to which this rank brings its request."""
        make = functools.partial(_core.Save, group, self._request, self._ranks.timeout, self._metadata)
        with naming(f"save() to {self._path}"):
            return self._ranks.verb(self._what, make, group)

    def _request(self) -> tuple[_core.SaveRequest, Progress | None, list[Comparison]]:
        step = self._find()
        self._to_save, compared = step.value, [*step.compared]
        files = self._to_save.files
        self._target = paths.to_write(self._path)
        self._memory = [_for_engine(file.parts) for file in files]
        engine_files = [
            _core.SaveFile(file.name, _views(parts), dict(file.metadata))
            for file, parts in zip(files, self._memory, strict=True)
        ]
        progress = shown(self._progress, f"save {Path(self._target).name}", self._ranks.rank)
        if dist.is_initialized() and self._ranks.size < dist.get_world_size():
            parts = (part for file in files for part in file.parts)
            self._claim = Claim(self._target, [file.name for file in files], parts, self._ranks)
            progress = self._claim.watched(progress)
            compared.append(self._claim)
        return _core.SaveRequest(engine_files, self._target, **self._to_save.options), progress, compared

    def _metadata(self) -> list[dict[str, str]]:
        claimed = {} if self._claim is None else self._claim.metadata()
        return [{**own, **claimed} for own in self._to_save.texts() or [{}] * len(self._memory)]


def texts(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Returns a user's ``metadata=``. Raises for what headers can't hold."""
    texts = {} if metadata is None else dict(instance("metadata", metadata, Mapping))
    for key, text in texts.items():
        if not isinstance(key, str) or not isinstance(text, str):
            wrong = key if not isinstance(key, str) else text
            raise invalid(
                f"metadata {key!r}: {wrong!r} is no text ({type(wrong).__name__}); headers hold texts alone: str(), "
                "json.dumps()"
            )
        utf8(key + text, f"metadata {key!r}", "headers")
    return texts


def read_merged(
    parts: Sequence[LocalShard], inputs: list[_core.MergeInput], ranks: RankGroup, **options: Any
) -> dict[str, Any]:
    """The engine's load of what is merged. Collective."""
    reached = _for_engine(parts)
    options["progress"] = shown(options.get("progress"), "load", ranks.rank)
    with naming("load() of what is merged"):
        report = _core.load_merged(ranks.group, _views(reached), inputs, timeout=ranks.timeout, **options)
    _bring_back(parts, reached)
    return report


def read_part(read: Callable[[_core.TensorView], None], part: LocalShard) -> None:
    """Fills the part by the ``read()`` of a checkpoint. Not collective."""
    read(*_views([part]))


class Load(ABC):
    """One load of all ranks, in the steps of LoadCall (src/file/load.h): what a rank does in each. What one raises on
    one rank is raised on all; until begin() nothing has been changed."""

    @abstractmethod
    def look(self) -> Sequence[Comparison]:
        """Returns what ranks compare, once this one has looked at what it was given."""

    @abstractmethod
    def find(self) -> tuple[str, list[str], bytes]:
        """(path, names of files there or none where the path is the checkpoint, words for all ranks), on rank 0."""

    @abstractmethod
    def wanted(self, words: bytes, files: list[_core.Checkpoint]) -> Sequence[tuple[Sequence[LocalShard], bool]]:
        """Returns what this rank wants of each file, and whether that must be all. Called again where the files were
        replaced meanwhile."""

    def begin(self, reports: list[dict[str, Any]]) -> None:  # noqa: B027
        """All fits: what the engine will fill may change now."""

    def has_read(self) -> None:  # noqa: B027
        """This rank has read what it wants; others may fail yet."""

    def choose(self, words: bytes, files: list[_core.Checkpoint]) -> list[tuple[list[_core.TensorView], bool]]:
        """Returns wanted() in memory that the engine reaches; for the engine, as is end()."""
        wanted = self.wanted(words, files)
        self._reached = [(parts, _for_engine(parts)) for parts, _ in wanted]
        return [(_views(reached), strict) for (_, reached), (_, strict) in zip(self._reached, wanted, strict=True)]

    def end(self) -> None:
        for parts, reached in self._reached:
            _bring_back(parts, reached)
        self.has_read()

    def run(self, where: object, ranks: RankGroup, what: str = "load()", **options: Any) -> list[dict[str, Any]]:
        """Returns the engine's report of each file. ``where`` is for messages. Collective."""
        settle(ranks.process_group)
        options["progress"] = shown(options.get("progress"), "load", ranks.rank)
        with naming(f"{what} of {where}"):
            load = functools.partial(_core.load_files, ranks.group, self, timeout=ranks.timeout, **options)
            reports: list[dict[str, Any]] = ranks.verb(what, load)
            return reports


def write_merged(inputs: list[_core.MergeInput], ranks: RankGroup, target: str, **options: Any) -> dict[str, Any]:
    """The engine's merge into files. Collective."""
    options["progress"] = shown(options.get("progress"), f"merge {Path(target).name}", ranks.rank)
    with naming(f"merge() to {target}"):
        return _core.merge(ranks.group, inputs, target, timeout=ranks.timeout, **options)


def _bring_back(parts: Sequence[LocalShard], reached: Sequence[LocalShard]) -> None:
    for part, filled in zip(parts, reached, strict=True):
        if filled is not part:
            part.flat.copy_(filled.flat)


def _for_engine(parts: Iterable[LocalShard]) -> list[LocalShard]:
    """The engine reaches the memory of the CPU, and of CUDA devices where one answers; of other devices it gets
    a copy.
    """

    def reached(flat: torch.Tensor) -> bool:
        return flat.is_cpu or (flat.is_cuda and _core.cuda_available())

    return [part if reached(part.flat) else part._replace(flat=part.flat.cpu()) for part in parts]


def _views(parts: Iterable[LocalShard]) -> list[_core.TensorView]:
    views = []
    for part in parts:
        utf8(part.name, f"the name {part.name!r}", "headers")
        dtype = dtypes.name_of(part.name, part.flat.dtype)
        region = _unpacked(part, dtypes.PACKED[dtype]) if dtype in dtypes.PACKED else part.region
        views.append(engine_view(part.name, dtype, part.flat, region))
    return views


def _unpacked(part: LocalShard, factor: int) -> _core.Region:
    """The region in the format's elements, of which the last dimension has ``factor`` times as many as torch's packed
    tensor.
    """
    shape, boxes = list(part.region.shape), part.region.boxes()
    if not shape or len(boxes) > 1:
        how = "is cut into flat parts" if shape else "has no dimension along which its elements are packed"
        raise unsupported(f"'{part.name}' is {part.flat.dtype} and {how}; files hold it whole or sharded by dimensions")
    offsets, sizes, _ = boxes[0] if boxes else ([0] * len(shape), [0] * len(shape), 0)
    scales = [1] * (len(shape) - 1) + [factor]
    dims = [[(begin * k, (begin + size) * k)] for begin, size, k in zip(offsets, sizes, scales, strict=True)]
    return _core.Region.grid([size * k for size, k in zip(shape, scales, strict=True)], dims)


def dtype_and_limit(dtype: torch.dtype | str | None, max_shard_size: int | str | None) -> dict[str, Any]:
    """Users' words as the engine's options."""
    found = dtypes.floating(dtype)
    return {"dtype": None if found is None else dtypes.NAMES[found], "max_shard_size": _bytes(max_shard_size)}


def _bytes(size: int | str | None) -> int:
    """0: no limit."""
    if not isinstance(size, str):
        return whole("max_shard_size", 0 if size is None else size)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    if not match or match[2].upper() not in _UNITS:
        raise invalid(f"max_shard_size={size!r}; give bytes, or a size like '5GB' or '500MiB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])
