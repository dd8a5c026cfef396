"""For every test on a device: what warns there is tested elsewhere."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _quiet(recwarn: pytest.WarningsRecorder) -> None:
    """16-bit averages, odd decays and devices without kernels warn."""
