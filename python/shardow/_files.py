"""Averages in safetensors files, by the file engine: each rank writes and reads its own bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from shardow import _core, _errors
from shardow._gather import Part
from shardow._options import invalid
from shardow._team import Team

_STATE = "shardow.state"  # key of the engine's state in a file's metadata
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_DTYPES = {
    torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


def save(path: Path, by_key: dict[str, list[Part]], state: str, team: Team) -> None:
    """One file, or with several keys a directory of one file each. Collective."""
    for key, parts in by_key.items():
        write(parts, _file(path, key, by_key), team, metadata={_STATE: state})


def state_in(path: Path, keys: Sequence[str], team: Team) -> str:
    """The state that save() wrote; raises where it did not write the file. Collective."""
    _, metadata = _core.read_catalog(team.group, str(_file(path, keys[0], keys)), team.timeout)
    if _STATE not in metadata:
        raise _errors.make("corrupt", f"{path} is not a saved EMA: its metadata has no {_STATE!r}; use load_state_dict() for weights alone")
    return str(metadata[_STATE])


def load(path: Path, by_key: dict[str, list[Part]], team: Team, check_only: bool = False) -> None:
    """Everything that does not fit is listed before anything changes: call with ``check_only`` first where there are several keys. Collective."""
    for key, parts in by_key.items():
        read_into(parts, _file(path, key, by_key), team, check_only=check_only)


def export(path: Path, parts: list[Part], team: Team, dtype: torch.dtype | str | None, max_shard_size: int | str | None) -> None:
    """A .safetensors file, or a Hugging Face directory: model.safetensors, or its shards and their index. Collective."""
    wanted, limit = team.agree("export()", lambda: (_dtype(dtype), _bytes(max_shard_size)))
    write(parts, path, team, dtype=wanted, max_shard_size=limit)


def write(parts: Sequence[Part], path: str | Path, team: Team, **options: Any) -> dict[str, Any]:
    """The engine's save. Device memory passes through a copy on the host. Collective."""
    host = _on_host(parts)  # alive during the call
    return _core.save(team.group, _views(host), str(path), timeout=team.timeout, **options)


def read_into(parts: Sequence[Part], path: str | Path, team: Team, **options: Any) -> dict[str, Any]:
    """The engine's load. Collective."""
    host = _on_host(parts)
    report = _core.load(team.group, _views(host), str(path), timeout=team.timeout, **options)
    for part, filled in zip(parts, host, strict=True):
        if part.flat.device.type != "cpu":
            part.flat.copy_(filled.flat)
    return report


def _on_host(parts: Iterable[Part]) -> list[Part]:
    return [Part(part.name, part.flat.cpu(), part.region) for part in parts]


def _views(parts: Iterable[Part]) -> list[_core.TensorView]:
    return [_core.TensorView(part.name, _dtype_name(part.name, part.flat.dtype), part.region, part.flat.data_ptr()) for part in parts]


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in _DTYPES:
        raise _errors.make("unsupported", f"'{name}' is {dtype}, which safetensors files do not have")
    return _DTYPES[dtype]


def _file(path: Path, key: str, keys: Iterable[str]) -> Path:
    name = f"ema-{re.sub(r'[^A-Za-z0-9.=_-]+', '-', key).strip('-')}.safetensors"
    return path if len(list(keys)) == 1 else path / name


def _dtype(dtype: torch.dtype | str | None) -> str | None:
    if dtype is None:
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in _DTYPES or not found.is_floating_point:
        raise invalid(f"dtype={dtype!r}; give a floating dtype, e.g. torch.bfloat16 or 'bfloat16'")
    return _DTYPES[found]


def _bytes(size: int | str | None) -> int:
    """0: no limit."""
    if size is None or isinstance(size, int):
        return size or 0
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    if not match or match[2].upper() not in _UNITS:
        raise invalid(f"max_shard_size={size!r}; give bytes, or a size like '5GB' or '500MiB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])
