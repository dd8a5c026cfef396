"""accelerate's register_for_checkpointing(): save_state() asks every rank for an object's state_dict(), and pickles one
rank's for all. A state in parts is refused there. Nothing but who calls tells that from torch.save() of a part on every
rank, each into its own file.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

from shardow.base.checks import unsupported


def refuse_of_one_rank(depth: int | None = None) -> None:
    """Raises UnsupportedError within accelerate's save_state(), where it keeps one rank's part alone. ``depth``: only
    where it is the caller of that many frames up; None: of any."""
    frame: FrameType | None = sys._getframe(1 if depth is None else depth + 1)
    while frame is not None:
        if (
            frame.f_code.co_name == "save_custom_state"
            and frame.f_globals.get("__name__") == "accelerate.checkpointing"
        ):
            if _keeps_every_rank(frame):
                return
            raise unsupported(
                "accelerate's save_state() writes what one rank has of a registered object, and these averages lie in "
                "parts on several: "
                "the other parts would be lost. In place of register_for_checkpointing(), "
                "accelerator.register_save_state_pre_hook(lambda models, weights, folder: "
                "ema.save(f'{folder}/ema.safetensors')), and "
                "accelerator.register_load_state_pre_hook(lambda models, folder: "
                "ema.load(f'{folder}/ema.safetensors')); "
                "every rank calls both"
            )
        frame = frame.f_back if depth is None else None


def _keeps_every_rank(frame: FrameType) -> bool:
    """``save_on_each_node``, of nodes with one rank each."""
    return bool(frame.f_locals.get("save_on_each_node")) and os.environ.get("LOCAL_WORLD_SIZE") == "1"
