"""Files of torch.save(), for surfaces whose origins write them: whole or not at all, and read without running what is in them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from shardow import errors
from shardow.compat._published import NewFile


def write(content: Any, path: str | Path) -> None:
    """torch.save(); what was at ``path`` stays until the new file is on the disk."""
    with contextlib.closing(NewFile(Path(path))) as new:
        torch.save(content, new.file)
        new.publish()


def read(path: str | Path) -> Any:
    """Tensors on the CPU, mapped: what is not used is not read. Raises ValueError for what is no such file, or holds other objects than tensors and plain values."""
    try:
        with open(path, "rb") as file:
            mapped = file.read(2) == b"PK"  # older files are no archives, and can't be
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise errors.make("not_found", f"there is no file {path}") from None
    except OSError:
        raise
    except Exception as error:  # the unpickler fails in many ways over what is no pickle
        raise errors.make("corrupt", f"{path} is not a whole file of tensors by torch.save(): {error}") from error


__all__ = ["read", "write"]
