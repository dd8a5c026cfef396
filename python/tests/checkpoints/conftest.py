"""A run of one process, and where its checkpoints go."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import Run

import shardow


@pytest.fixture
def run() -> Run:
    found = Run("plain")
    found.train(2)
    return found


@pytest.fixture
def checkpoints(tmp_path: Path) -> shardow.Checkpoints:
    return shardow.Checkpoints(tmp_path / "run")
