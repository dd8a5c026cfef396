from __future__ import annotations
from shardow import _core
def half_life(steps): return _core.Schedule.make("constant", {"decay": 0.5 ** (1/steps)})
def as_schedules(decay):
    import warnings
    ds = decay if isinstance(decay, (list, tuple)) else [decay]
    for d in ds:
        if isinstance(d, float) and d < .5: warnings.warn("looks like a lerp weight")
    return [d if isinstance(d, _core.Schedule) else _core.Schedule.make("constant", {"decay": d}) for d in ds]
