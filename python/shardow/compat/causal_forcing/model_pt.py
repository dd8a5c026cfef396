"""model.pt, of Causal-Forcing's trainers and scripts: ``{"generator_ema": {key: tensor}, "generator": ...}`` by
torch.save().
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardow import errors
from shardow.base.checks import invalid
from shardow.compat._impl.swapped_model_proxy import ranks_of
from shardow.compat.causal_forcing.ema_fsdp import EMA_FSDP
from shardow.compat.files import torch_files
from shardow.compat.files.torch_files import whole_state_dict
from shardow.ema import model_averages
from shardow.model.names import model_and_root, without_wrappers
from shardow.model.slots import slots
from shardow.start.materialize import materialize


def write_model_pt(
    path: str | Path, ema: EMA_FSDP | None = None, key_style: str = "wrapped", **models: nn.Module
) -> None:
    """``ema`` as "generator_ema", and live models by name (``generator=``, ``critic=``), gathered to rank 0, which
    writes them. Collective.

    What was there stays until the new file is whole. For a model that does not fit one host: EMA_FSDP.save(),
    shardow.save().

    Args:
        key_style: of the averages: "wrapped", which the origin's readers look for, or "clean".

    Raises:
        OSError, on every rank: rank 0 could not write.
    """
    if ema is None and not models:
        raise invalid("write_model_pt(): nothing to write; give ema=, generator= or other models")
    content = {} if ema is None else {"generator_ema": ema.full_state_dict(key_style=key_style)}
    content.update({name: whole_state_dict(model_and_root(model)[0]) for name, model in models.items()})
    ranks = ranks_of(model_and_root(next(iter(models.values())))[0]) if ema is None else model_averages(ema.ema).ranks
    ranks.agree("write_model_pt()", lambda: torch_files.write(content, path) if ranks.rank == 0 else None)


def read_model_pt(path: str | Path, entry: str = "generator_ema") -> dict[str, torch.Tensor]:
    """One entry's tensors, mapped from the file, without wrappers in their keys. Raises KeyError where there is no such
    entry.
    """
    content = torch_files.read(path)
    if not isinstance(content, Mapping) or not isinstance(content.get(entry), Mapping):
        there = ", ".join(map(repr, content)) if isinstance(content, Mapping) else type(content).__name__
        raise errors.make("not_found", f"{path} has no {entry!r}; it has {there[:400]}")
    found: dict[str, torch.Tensor] = {}
    for key, tensor in content[entry].items():
        if (name := without_wrappers(key)) in found:
            raise errors.make("corrupt", f"{path} has '{name}' twice in {entry!r}, once as '{key}'")
        found[name] = tensor
    return found


@torch.no_grad()
def load_model_pt(target: EMA_FSDP | nn.Module | Any, path: str | Path, entry: str = "generator_ema") -> None:
    """One entry into averages, or into a model, sharded or not, also one on meta; each rank reads its own slices.
    Collective.

    Buffers of the model that the entry lacks keep their values. Raises, on every rank and before anything changes,
    where other names or shapes differ.
    """
    model = target._model if isinstance(target, EMA_FSDP) else model_and_root(target)[0]
    found = ranks_of(model).agree("load_model_pt()", lambda: read_model_pt(path, entry))
    if isinstance(target, EMA_FSDP):
        target.load_state_dict(found)
    else:
        own = [
            slot
            for slot in slots(model, "buffer")
            if not slot.recorded.is_meta and not hasattr(slot.recorded, "_local_tensor")
        ]
        materialize(model, {**{slot.name: slot.recorded for slot in own}, **found})  # no average has buffers
