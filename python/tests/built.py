"""How tests start programs, and where what they need was built."""

from __future__ import annotations

import json
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


def named(folder: Path) -> dict[str, Path]:
    """Returns the files of a directory of averages, by the names that were asked for."""
    files: dict[str, str] = json.loads((folder / "averages.json").read_text())["shardow.files"]
    return {name: folder / file for name, file in files.items()}


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of these files. Nothing else is there but their list."""
    files = named(folder)
    assert {*folder.iterdir()} == {*files.values(), folder / "averages.json"}
    return {name: path.read_bytes() for name, path in files.items()}
