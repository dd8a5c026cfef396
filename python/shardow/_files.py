"""Averages in safetensors files, through rank 0: each full tensor arrives, is kept until the file is complete, and is written once.

Rank 0 needs host memory for the file that it writes; the parallel writer of the file engine takes that away.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shardow import _core, _errors, _state
from shardow._gather import Gatherer
from shardow._options import invalid
from shardow._team import Team
from shardow._tracked import Tracked

_STATE = "shardow.state"  # key of the engine's state in a file's metadata
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def save(path: Path, keys: list[str], state: str, gatherer: Callable[[int], Gatherer], team: Team) -> None:
    """One file, or with several keys a directory of one file each."""
    if len(keys) > 1 and team.rank == 0:
        team_check = _make_directory(path)
    else:
        team_check = None
    team.agree("save()", lambda: _reraise(team_check))
    for k, key in enumerate(keys):
        tensors = dict(_received(gatherer(k)))
        file = path if len(keys) == 1 else path / _file_name(key)
        team.agree("save()", lambda: _write(file, tensors, {_STATE: state, "format": "pt"}) if team.rank == 0 else None)  # noqa: B023


def check(path: Path, tracked: list[Tracked], keys: list[str]) -> tuple[list[tuple[torch.Tensor, Any, _core.Region | None]], str]:
    """(what load copies, engine's state). Raises with everything that does not fit, before anything is copied."""
    copies: list[tuple[torch.Tensor, Any, _core.Region | None]] = []
    problems: list[str] = []
    state = ""
    for k, key in enumerate(keys):
        file = path if len(keys) == 1 else path / _file_name(key)
        slices, state = _open(file)
        problems += [f"{file}: {problem}" for problem in _state.unfit(slices, {one.name: tuple(one.region.shape) for one in tracked})]
        copies += [(one.averages[k], slices[one.name], one.region) for one in tracked if one.name in slices]
    if problems:
        raise invalid(f"the file does not fit this EMA, nothing was loaded: {'; '.join(problems)}")
    return copies, state


def export(path: Path, gatherer: Gatherer, team: Team, dtype: torch.dtype | str | None, max_shard_size: int | str | None) -> None:
    """A .safetensors file, or a Hugging Face directory: model.safetensors, or its shards and their index."""
    wanted = _dtype(dtype)
    limit = _bytes(max_shard_size)
    tensors = {name: tensor.to(wanted) if wanted and tensor.is_floating_point() else tensor for name, tensor in _received(gatherer)}

    def write() -> None:
        if team.rank != 0:
            return
        if path.suffix == ".safetensors":
            _write(path, tensors, {"format": "pt"})
        else:
            _write_directory(path, tensors, limit)

    team.agree("export()", write)


def _received(gatherer: Gatherer) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in gatherer.stream() if tensor is not None]


def _file_name(key: str) -> str:
    return f"ema-{re.sub(r'[^A-Za-z0-9.=_-]+', '-', key).strip('-')}.safetensors"


def _make_directory(path: Path) -> BaseException | None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error
    return None


def _reraise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Under a temporary name, then renamed: the path names the old file or the new one."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    try:
        save_file(dict(tensors), temporary, metadata)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_directory(path: Path, tensors: Mapping[str, torch.Tensor], limit: int | None) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if limit is not None and shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        _write(path / "model.safetensors", shards[0], {"format": "pt"})
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        _write(path / name, shard, {"format": "pt"})
    where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    temporary = path / ".model.safetensors.index.json.tmp"
    temporary.write_text(json.dumps(index, indent=2))
    os.replace(temporary, path / "model.safetensors.index.json")


def _open(path: Path) -> tuple[dict[str, _Slice], str]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise _errors.make("not_found", f"no file {path}; save() writes one")
    try:
        file = safe_open(path, framework="pt")
        metadata = file.metadata() or {}
    except SafetensorError as error:
        raise _errors.make("corrupt", f"{path}: {error}") from None
    if _STATE not in metadata:
        raise _errors.make("corrupt", f"{path} is not a saved EMA: its metadata has no {_STATE!r}; use load_state_dict() for weights alone")
    return {name: _Slice(file.get_slice(name)) for name in file.keys()}, metadata[_STATE]  # noqa: SIM118


class _Slice:
    """A tensor in a file, read where it is indexed."""

    def __init__(self, slice_: Any) -> None:
        self._slice = slice_

    def size(self) -> tuple[int, ...]:
        return tuple(self._slice.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._slice[index if index else ...]
        return tensor


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise invalid(f"dtype={dtype!r}; give a floating dtype, e.g. torch.bfloat16 or 'bfloat16'")
    return found


def _bytes(size: int | str | None) -> int | None:
    if size is None or isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    if not match or match[2].upper() not in _UNITS:
        raise invalid(f"max_shard_size={size!r}; give bytes, or a size like '5GB' or '500MiB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])
