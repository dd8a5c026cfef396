"""The frozen suites are as tests/frozen.txt has them, and know nothing of the inside of shardow."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
INSIDE = {
    ".py": r"\._core\b|\bimport _core\b|\bcompat\.ways\b"
    r"|\bshardow\.(_core|averaging|base|checkpoints|distributed|files|merging|sharding|start)\b",
    ".cc": r'#include "(average|base|cli|group|ema|file|kernels|merge|mpi|posthoc|tensor)/|custom_group',
}


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("frozen", ROOT / "tools" / "frozen.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


frozen = loaded()


def test_frozen_suites_are_as_recorded() -> None:
    changes = frozen.changes(frozen.recorded(), frozen.sums())
    assert changes == [], "\n".join(changes)


def test_every_change_is_named() -> None:
    before = {"same": "1", "other": "2", "removed": "3"}
    changes = frozen.changes(before, {"same": "1", "other": "4", "added": "5"})
    assert [change.split(";")[0] for change in changes] == ["added is new", "other changed", "removed is gone"]


def test_frozen_suites_know_nothing_of_the_inside() -> None:
    for path in frozen.files():
        pattern = INSIDE[".cc" if path.endswith((".cc", ".h")) else ".py"]
        lines = (ROOT / path).read_text().splitlines()
        assert [line for line in lines if re.search(pattern, line)] == [], path


def test_every_suite_has_files() -> None:
    for suite, patterns in frozen.SUITES.items():
        assert all(any(ROOT.glob(pattern)) for pattern in patterns), suite
