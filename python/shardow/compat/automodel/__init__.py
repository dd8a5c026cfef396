"""NVIDIA-NeMo/Automodel's averages (components/training/ema.py) and the reader of its YAML section, on shardow.EMA and
on a second model. Both average by e.mul_(d).add_(p, alpha=1-d); in float32 that is the origin's result bit for bit.
Names are the unwrapped model's.
"""

from shardow.compat.automodel.managed import Unmatched
from shardow.compat.automodel.second_model import ShardedModelEMAManager
from shardow.compat.automodel.section import build_ema
from shardow.compat.automodel.shadow import EMAManager

__all__ = ["EMAManager", "ShardedModelEMAManager", "Unmatched", "build_ema"]
