"""Tensors in safetensors files, by the file engine: each rank writes and reads its own bytes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardow import _core, errors
from shardow.base.checks import instance, invalid, unsupported, utf8, whole
from shardow.base.progress import shown
from shardow.files import paths
from shardow.files.background import CHANNEL, SaveHandle, settle, start
from shardow.files.claims import claimed
from shardow.files.paths import StrPath
from shardow.model import dtypes
from shardow.model.extra_state import for_file
from shardow.model.storage import engine_view
from shardow.ranks.gather import Part
from shardow.ranks.store_group import store_group
from shardow.ranks.team import Team, naming
from shardow.ranks.waiting import keep_one

_UNITS = {"": 1, "B": 1} | {f"{unit}{b}": base**k for base, b in ((10**3, "B"), (2**10, "IB"))
                            for k, unit in enumerate("KMGT", 1)}  # fmt: skip


@dataclass
class FileParts:
    """What this rank holds of one file. ``name`` is empty where the engine names files as Hugging Face does."""

    name: str
    parts: Sequence[Part]
    metadata: Mapping[str, str] = field(default_factory=dict)


def with_extra(name: str, parts: Sequence[Part], extra: Mapping[str, Any], metadata: Mapping[str, str]) -> FileParts:
    """A file of ``parts``, with a module's extra states, which are rank 0's; elsewhere ``extra`` is empty."""
    more, texts = for_file(extra)
    return FileParts(name, [*parts, *more], {**texts, **metadata})


def in_dtypes(
    parts: Sequence[Part], own: Mapping[str, torch.dtype], wanted: torch.dtype | None
) -> tuple[list[Part], str | None]:
    """(parts, the dtype to which the engine casts): so that floating tensors end up as ``wanted``, or each as its
    ``own``, by name. ``own`` has every name, on all ranks alike. The engine knows one dtype for all, of 16 bits or
    more; for others parts are copied.
    """
    targets = {name: wanted or dtype for name, dtype in own.items() if dtype.is_floating_point}
    different = set(targets.values())
    if len(different) == 1 and next(iter(different)).itemsize > 1:
        return list(parts), dtypes.NAMES[different.pop()]
    return [Part(one.name, one.flat.to(targets.get(one.name, one.flat.dtype)), one.region) for one in parts], None


def opened(path: StrPath, team: Team) -> _core.Checkpoint:
    """Of what the path is now: it stays that version for all who read from it. Collective."""
    settle(team.process_group)
    where = paths.to_read(path)
    with _several_said(where), naming(f"opening {where}"):
        return _core.Checkpoint.open(team.group, where, team.timeout)


@contextlib.contextmanager
def _several_said(where: str) -> Iterator[None]:
    """A path that is no checkpoint, but a directory of several: the error says so."""
    try:
        yield
    except errors.InvalidArgumentError:
        if several := _core.ema_files_in(where):
            one_of_them = f"give the file of one of them: {', '.join(several.values())}"
            raise invalid(f"{where} is a saved EMA of decays {', '.join(several)}; {one_of_them}") from None
        raise


Committed = Callable[[], None]


def write(
    files: Sequence[FileParts], path: StrPath, team: Team, committed: Committed | None = None, **options: Any
) -> dict[str, Any]:
    """Saves ``files``. ``committed()`` is called on rank 0 when all is published. Collective."""
    settle(team.process_group)
    with naming(f"save() to {path}"):
        save, _memory = _prepared(team.group, files, path, team, options)
        report: dict[str, Any] = save.write()
    if committed is not None and team.rank == 0:
        committed()
    return report


def write_in_background(
    files: Sequence[FileParts], path: StrPath, team: Team, committed: Committed | None = None, **options: Any
) -> SaveHandle:
    """Does what write() does, and returns when everything is copied. Collective, the rest in the background too."""
    settle(team.process_group)
    group = _core.solo() if team.process_group is None else store_group(team.process_group, CHANNEL)
    group.begin("async_save()", team.timeout)
    save, _memory = _prepared(group, files, path, team, options)
    if team.size > 1:
        keep_one()
    return start(team.process_group, save, paths.to_write(path), committed if team.rank == 0 else None)


def _prepared(
    group: _core.Group, files: Sequence[FileParts], path: StrPath, team: Team, options: dict[str, Any]
) -> tuple[_core.Save, list[list[Part]]]:
    """Returns the engine's save and the memory that it reads, which must stay until it is written or staged."""

    def checked() -> tuple[str, list[list[Part]], list[list[_core.TensorView]], list[dict[str, str]]]:
        memory = [_for_engine(file.parts) for file in files]
        return paths.to_write(path), memory, [*map(_views, memory)], [_texts(file.metadata) for file in files]

    target, memory, views, texts = team.agree("save()", checked)
    progress = shown(options.pop("progress", None), f"save {Path(target).name}", team.rank)
    parts = (part for file in files for part in file.parts)
    claim, progress = claimed(target, [file.name for file in files], parts, team, progress)
    engine_files = [
        _core.SaveFile(file.name, tensors, {**own, **claim})
        for file, tensors, own in zip(files, views, texts, strict=True)
    ]
    return _core.Save(group, engine_files, target, timeout=team.timeout, progress=progress, **options), memory


def texts(metadata: Mapping[str, str] | None) -> Mapping[str, str]:
    """Returns a user's ``metadata=``."""
    return {} if metadata is None else instance("metadata", metadata, Mapping)


def _texts(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, text in metadata.items():
        if not isinstance(key, str) or not isinstance(text, str):
            wrong = key if not isinstance(key, str) else text
            raise invalid(
                f"metadata {key!r}: {wrong!r} is no text ({type(wrong).__name__}); headers hold texts alone: str(), "
                "json.dumps()"
            )
        utf8(key + text, f"metadata {key!r}", "headers")
    return dict(metadata)


def read_into(
    parts: Sequence[Part], found: _core.Checkpoint | list[_core.MergeInput], team: Team, **options: Any
) -> dict[str, Any]:
    """The engine's load, of a checkpoint or of what is merged. Collective."""
    reached = _for_engine(parts)
    told = {**options, "progress": shown(options.get("progress"), "load", team.rank)}
    load: Any = _core.load_merged if isinstance(found, list) else _core.load
    with naming("load() of what is merged" if isinstance(found, list) else "load()"):
        report: dict[str, Any] = load(team.group, _views(reached), found, timeout=team.timeout, **told)
    _bring_back(parts, reached)
    return report


def read_part(read: Callable[[_core.TensorView], None], part: Part) -> None:
    """Fills the part by the ``read()`` of a checkpoint. Not collective."""
    read(*_views([part]))


Choose = Callable[[_core.Checkpoint], tuple[Sequence[Part], bool]]


def read_chosen(path: StrPath, choose: Choose, team: Team, **options: Any) -> dict[str, Any]:
    """opened() and read_into() in one. Collective. ``choose(checkpoint)`` says what this rank wants, and whether that
    must be all. What it raises is raised on every rank, before anything changes. It is called again where the path was
    replaced meanwhile.
    """
    settle(team.process_group)
    where = paths.to_read(path)
    wanted: list[Sequence[Part]] = [[], []]  # what is asked for, and the memory that the engine fills

    def views(found: _core.Checkpoint) -> tuple[list[_core.TensorView], bool]:
        parts, strict = choose(found)
        wanted[:] = parts, _for_engine(parts)
        return _views(wanted[1]), strict

    told = {**options, "progress": shown(options.get("progress"), "load", team.rank)}
    with _several_said(where), naming(f"load() of {where}"):
        report = _core.load_chosen(team.group, where, views, timeout=team.timeout, **told)
    _bring_back(*wanted)
    return report


def write_merged(
    inputs: list[_core.MergeInput], path: StrPath, team: Team, metadata: Mapping[str, str], **options: Any
) -> dict[str, Any]:
    """The engine's merge into files. Collective."""
    settle(team.process_group)
    target, texts = team.agree("merge()", lambda: (paths.to_write(path), _texts(metadata)))
    told = {**options, "progress": shown(options.get("progress"), f"merge {Path(target).name}", team.rank)}
    with naming(f"merge() to {target}"):
        return _core.merge(team.group, inputs, target, metadata=texts, timeout=team.timeout, **told)


def _bring_back(parts: Sequence[Part], reached: Sequence[Part]) -> None:
    for part, filled in zip(parts, reached, strict=True):
        if filled is not part:
            part.flat.copy_(filled.flat)


def _for_engine(parts: Iterable[Part]) -> list[Part]:
    """The engine reaches the memory of the CPU, and of CUDA devices where one answers; of other devices it gets
    a copy.
    """

    def reached(flat: torch.Tensor) -> bool:
        return flat.is_cpu or (flat.is_cuda and _core.cuda_available())

    return [part if reached(part.flat) else part._replace(flat=part.flat.cpu()) for part in parts]


def _views(parts: Iterable[Part]) -> list[_core.TensorView]:
    views = []
    for part in parts:
        utf8(part.name, f"the name {part.name!r}", "headers")
        dtype = dtypes.name_of(part.name, part.flat.dtype)
        region = _unpacked(part, dtypes.PACKED[dtype]) if dtype in dtypes.PACKED else part.region
        views.append(engine_view(part.name, dtype, part.flat, region))
    return views


def _unpacked(part: Part, factor: int) -> _core.Region:
    """The region in the format's elements, of which the last dimension has ``factor`` times as many as torch's packed
    tensor.
    """
    shape, boxes = list(part.region.shape), part.region.boxes()
    if not shape or len(boxes) > 1:
        how = "is cut into flat parts" if shape else "has no dimension along which its elements are packed"
        raise unsupported(
            f"'{part.name}' is {part.flat.dtype} and {how}; files hold it whole, or sharded by dimensions"
        )
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
