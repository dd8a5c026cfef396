"""What a library's save_pretrained() leaves, with averaged weights, for its from_pretrained()."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from shardow.averages.persistence import export
from shardow.ema import EMA

#: diffusers' own name.
_DIFFUSION = "diffusion_pytorch_model.safetensors"


def save_pretrained(
    ema: EMA,
    model: nn.Module,
    folder: str | Path,
    dtype: Any = None,
    *,
    main: bool,
    max_shard_size: int | str | None = None,
    decay: Any = None,
) -> None:
    """The averages of ``model``, which is unwrapped: of transformers or diffusers, with its configuration; of PEFT, the
    averaged adapter in its own dtype; of any other, weights alone. Every rank writes its part of them, by the names and
    in the form of transformers' own save_pretrained(). Collective.

    Args: of EMA.export(), and ``main``: this rank writes all else. A model of diffusers is one file.
    """
    folder, own = Path(folder), getattr(model, "save_pretrained", None)
    if hasattr(model, "peft_config"):
        adapter = ema.full_state_dict(decay, complete=False)  # small
        own(folder, state_dict=adapter) if main and own else None
        return
    diffusion = hasattr(model, "save_config")
    if main and diffusion:
        model.save_config(folder)  # type: ignore[operator]
    elif main and own:
        own(folder, state_dict={})  # first: it removes other weights
        if dtype is not None:
            config = folder / "config.json"
            values = {**json.loads(config.read_text()), "dtype": str(dtype).removeprefix("torch.")}
            config.write_text(json.dumps(values, indent=2) + "\n")
    if diffusion:
        ema.export(folder / _DIFFUSION, dtype, decay=decay)
    else:
        export(ema._averages, folder, dtype, max_shard_size, decay, None, None, pretrained=True)
