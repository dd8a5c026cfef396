"""What DistEMA checks before anything changes: its options, a saved ``config``, the tensors of a state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardow import errors
from shardow.averages import state as _state
from shardow.base.checks import fraction, invalid, whole
from shardow.compat.dist_ema.shares import Share
from shardow.model import match
from shardow.model.local import LocalTensor
from shardow.model.parts import Held
from shardow.ranks.gather import Part

CONFIG = "shardow.dist_ema"  # key of ``config`` in a file's metadata
PRECISION_TO_TYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def check_options(config: Mapping[str, Any], world_size: int, rank: int) -> None:
    """Raises ValueError; also KeyError and TypeError, where the origin does."""
    if config["dtype"] not in PRECISION_TO_TYPE:
        raise invalid(
            f"dtype={config['dtype']!r}; it must be one of {', '.join(map(repr, PRECISION_TO_TYPE))}", KeyError
        )
    if config["warmup"] and config["power"] is None:
        raise invalid(
            "warmup=True needs a power: 2 / 3 reaches a decay of 0.999 in 31.6 thousand steps, 3 / 4 in 10 thousand",
            TypeError,
        )
    if whole("rank", rank, 0) >= whole("world_size", world_size, 1):
        raise invalid(f"rank={rank}; with world_size={world_size} it must be less")
    for name in ("decay", "min_decay"):
        fraction(name, config[name])
    if config["warmup"] and not config["inv_gamma"] > 0:
        raise invalid(f"inv_gamma={config['inv_gamma']}; it must be more than 0")


def steps_in(saved: Mapping[str, Any], here: Mapping[str, Any]) -> int:
    """decay_steps of a saved ``config``; raises ValueError where other options differ from those here."""
    other = {key: value for key, value in here.items() if key != "decay_steps" and saved.get(key) != value}
    if other:
        differs = ", ".join(f"{key}={saved.get(key)!r} (here {value!r})" for key, value in other.items())
        way_out = "make DistEMA with the same options, or pass the averages alone and set_decay_steps()"
        raise invalid(f"the averages were saved with {differs}; {way_out}")
    return whole("decay_steps", saved.get("decay_steps"), 0)


def config_in(path: str | Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Of a file that DistEMA saved; raises ValueError for another one."""
    if CONFIG not in metadata:
        why = f"its metadata has no {CONFIG!r}; use load_state_dict() for weights alone"
        raise errors.make("corrupt", f"{path} is not a saved DistEMA: {why}")
    config: dict[str, Any] = json.loads(metadata[CONFIG])
    return config


def fitting(
    shares: Sequence[Share], buffers: Sequence[LocalTensor], called: Mapping[str, str], state: Mapping[str, Any]
) -> list[tuple[Share, torch.Tensor]]:
    """Shares with their whole tensors, without buffers. Raises KeyError with all that does not fit. ``called``: names
    in states.
    """
    parts = [Part(one.name, one.average, one.region) for one in shares]
    parts += [Part(one.name, one.tensor.reshape(-1), one.region) for one in buffers]
    fit = match.fit(
        Held(parts, {part.name: (part.name, called[part.name]) for part in parts}, None), state, "the state"
    )
    found = {one.name: state[fit.keys[one.name]] for one in shares if one.name in fit.keys}
    for name, tensor in found.items():
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise invalid(
                f"load_state_dict(): nothing was loaded: '{name}' is a {type(tensor).__name__}, not a whole tensor",
                KeyError,
            )
    shapes = {one.name: one.shape for one in shares}
    checked = match.compare(shapes, _state.shapes_of(found, shapes))
    replace(checked, unexpected=fit.unexpected).refuse("load_state_dict()", "the state", KeyError)
    return [(one, found[one.name].detach()) for one in shares]
