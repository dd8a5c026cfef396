"""The one way from tests to what an EMA keeps to itself."""

from __future__ import annotations

from shardow import EMA
from shardow.averages.core import Averages


def averages_of(ema: EMA) -> Averages:
    """Returns the implementation behind ``ema``."""
    return ema._averages
