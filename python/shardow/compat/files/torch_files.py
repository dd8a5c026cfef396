"""Files of torch.save(), for surfaces whose origins write them: whole or not at all, and read without running what is
in them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardow import errors
from shardow.compat.files.published import new_file
from shardow.distributed.gather import Gatherer
from shardow.distributed.rank_group import RankGroup
from shardow.model.parts import held_by
from shardow.model.swap_guard import refuse_foreign


def whole_state_dict(model: nn.Module, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, torch.Tensor]:
    """CPU tensors of parameters and persistent buffers, under all clean names, on rank 0; {} elsewhere. Collective.
    ``wanted``: names.
    """
    held = held_by(model, None, saving=False)
    refuse_foreign("a state of the whole model", held.memory, instead="for the weights")
    held.parts = [part for part in held.parts if wanted(part.name)]
    return Gatherer("state_dict()", held.parts, RankGroup(held.process_group, None)).whole(held.names)


def write(content: Any, path: str | Path) -> None:
    """torch.save(); what was at ``path`` stays until the new file is on the disk."""
    with new_file(Path(path)) as file:
        torch.save(content, file)


def read(path: str | Path) -> Any:
    """Tensors on the CPU, mapped: what is not used is not read. Raises ValueError for other files, and for objects in
    them.
    """
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
