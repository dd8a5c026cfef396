"""Which switches of memory.apply() are on in training."""

from __future__ import annotations

from typing import Any

import torch

import shardow

from .options import Options


def chosen(options: Options) -> dict[str, Any] | None:
    """Arguments of memory.apply(); None: no switch is on. The model has no attention that could give weights."""
    if not (options.use_bf16 or options.use_activation_checkpointing):
        return None
    return {"bf16": options.use_bf16, "activation_checkpointing": options.use_activation_checkpointing, "attention_weights": True}


def put_on(model: torch.nn.Module, options: Options) -> None:
    """For good."""
    wanted = chosen(options)
    if wanted is not None:
        shardow.memory.apply(model, **wanted)
