"""Files of torch.save(), for surfaces whose origins write them: whole or not at all, and read without running what is in them."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from shardow import _errors


def write(content: Any, path: str | Path) -> None:
    """torch.save() under a temporary name beside ``path``, which it replaces when it is on the disk."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "xb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: str | Path) -> Any:
    """Tensors on the CPU, mapped: what is not used is not read. Raises ValueError for what is no such file, or holds other objects than tensors and plain values."""
    try:
        with open(path, "rb") as file:
            mapped = file.read(2) == b"PK"  # older files are no archives, and can't be
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise _errors.make("not_found", f"there is no file {path}") from None
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise _errors.make("corrupt", f"{path} is not a whole file of tensors by torch.save(): {error}") from error


__all__ = ["read", "write"]
