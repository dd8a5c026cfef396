"""The mistakes that `make mutants` plants have a place: each text is once in its file, and its tests are there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("tomllib", reason="tests/mutants has tables in TOML, which Python reads from 3.11 on")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants_run", ROOT / "tests" / "mutants" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def test_every_planted_mistake_has_its_place(mutants: ModuleType) -> None:
    entries = mutants.tables()
    assert {entry.table for entry in entries} >= {"averages", "checkpoints", "files"}
    assert [problem for entry in entries if (problem := entry.problem())] == []
    assert len({(entry.file, entry.old, entry.new) for entry in entries}) == len(entries)
    assert all(entry.old != entry.new and entry.what and (entry.tests or entry.equivalent) for entry in entries)


def test_a_mistake_whose_place_is_gone_is_said(mutants: ModuleType) -> None:
    entry = mutants.Mutant(
        "files", "src/file/save.cc", "no such text", "", "a flush is left out", ("file_test Saving.*",)
    )
    assert "0 times in src/file/save.cc, not once" in entry.problem()
    assert "src/file/save.cc" in entry.problem()
