"""The extension module that users get has what shardow calls, and nothing that only tests and benchmarks call: that is
in the modules of core_modules.py."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from core_modules import HOOKS

import shardow
from shardow import _core

HOOKS_NAMES = [
    "Limit", "fail_swaps", "group_checks", "header_of", "hold_updates", "parse_header", "simd_target", "threads",
]  # fmt: skip
WITHDRAWN = ["holding_words", "summed_holdings"]
WORDS = ("bench", "fail_swap", "fake", "hold_", "hook", "inject", "mock", "seam", "stop", "test")


def names_in(module: object) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_")]


def names_of_hooks() -> list[str]:
    from shardow._core import hooks  # type: ignore[attr-defined]

    return names_in(hooks)


def test_shipped_module_has_no_hooks() -> None:
    members = [name for owner in map(_core.__dict__.get, names_in(_core)) for name in names_in(owner)]
    names = {*names_in(_core), *members}
    assert sorted(names & {*HOOKS_NAMES, *WITHDRAWN}) == []
    assert sorted(name for name in names if name.lower().startswith(WORDS)) == []
    assert HOOKS.run(1, names_of_hooks) == [HOOKS_NAMES]


def test_shardow_calls_every_function_of_the_shipped_module() -> None:
    sources = [path.read_text() for path in Path(shardow.__file__).parent.rglob("*.py")]
    used = {name for text in sources for name in re.findall(r"\b_core\.(\w+)", text)}
    functions = [name for name in names_in(_core) if not inspect.isclass(getattr(_core, name))]
    assert sorted(set(functions) - used) == []
