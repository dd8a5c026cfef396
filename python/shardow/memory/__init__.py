"""What memory a run takes.

timeline() samples every rank during a block, draw() shows several of them side by side, apply() makes training steps
take less, plan() predicts and measure() counts what they hold. Each is imported where it is first used: not all of them
need torch.

May import: averaging, sharding, distributed, base, errors, ema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardow.base.checks import with_torch

if TYPE_CHECKING:
    from shardow.memory.drawing import draw, figure
    from shardow.memory.measurement import measure
    from shardow.memory.prediction import Usage, plan
    from shardow.memory.samples import Timeline, timeline
    from shardow.memory.switches import Switches, apply

__all__ = ["Switches", "Timeline", "Usage", "apply", "draw", "figure", "measure", "plan", "timeline"]
_HOMES = {
    "Switches": "switches", "Timeline": "samples", "Usage": "prediction", "apply": "switches",
    "draw": "drawing", "figure": "drawing", "measure": "measurement", "plan": "prediction", "timeline": "samples",
}  # fmt: skip


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        import importlib

        if name in _HOMES:
            with with_torch(f"shardow.memory.{name}"):
                return getattr(importlib.import_module(f"shardow.memory.{_HOMES[name]}"), name)
        raise AttributeError(f"module 'shardow.memory' has no attribute {name!r}")
