"""The one way from tests to what an EMA keeps to itself."""

from __future__ import annotations

from shardow import EMA
from shardow.averaging.model_averages import ModelAverages


def averages_of(ema: EMA) -> ModelAverages:
    """Returns the implementation behind ``ema``."""
    return ema._averages
