"""How tests start programs, and where what they need was built."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "release"
CMAKE = Path(sys.executable).parent / "cmake"

Launch = Callable[..., subprocess.CompletedProcess[str]]


def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=280, env=environment)


def succeed(*words: object, **environment: str) -> str:
    done = run(*words, **environment)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def install(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ package as a user has it."""
    prefix = tmp_path_factory.mktemp("prefix")
    succeed(CMAKE, "--install", BUILD, "--component", "cpp", "--prefix", prefix)
    return prefix
