"""What ema-pytorch's EMA and ours are compared by."""

from __future__ import annotations

from typing import Any

import torch

SOON: dict[str, Any] = {"update_after_step": 5, "update_every": 3}


def floats(ema: Any) -> dict[str, torch.Tensor]:
    """Counters and everything that the origin averages; it never touches integer buffers."""
    state = dict(ema.ema_model.state_dict())
    state.update({f"temporary {name}": b for name, b in ema.ema_model.named_buffers() if name not in state})
    return {name: t for name, t in state.items() if t.is_floating_point()} | {"step": ema.step, "initted": ema.initted}


def same(ours: Any, theirs: Any) -> bool:
    a, b = floats(ours), floats(theirs)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
