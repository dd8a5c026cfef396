"""Which of several averages ``decay=`` chooses. What they are called is the engine's to say:
include/shardow/ema_file.h.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardow import _core
from shardow.base.checks import invalid


def choose(keys: Sequence[str], decay: object) -> int:
    """The index that ``decay`` names: a number, a key or a Schedule; None where there is but one."""
    if decay is None:
        if len(keys) == 1:
            return 0
        raise invalid(f"this EMA keeps {len(keys)} averages; say which with decay=, one of {', '.join(keys)}")
    if isinstance(decay, _core.Schedule):
        key = decay.key()
    else:
        key = repr(float(decay)).removesuffix(".0") if isinstance(decay, (int, float)) else str(decay)
    if key not in keys:
        raise invalid(f"decay={decay}; this EMA keeps {', '.join(keys)}")
    return list(keys).index(key)
