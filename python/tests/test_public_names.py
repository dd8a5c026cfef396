"""What users can name, and how they call it, is as recorded in public_names.txt.

After a change that is meant, `python python/tests/test_public_names.py` writes it anew.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import shardow

RECORD = Path(__file__).with_name("public_names.txt")
# Special methods that count as our own.
OWN = {"__init__", "__call__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__", "__contains__"}


def _called(function: Any) -> str:
    """Names, kinds and defaults; annotations are left to type checkers."""
    signature = inspect.signature(function)
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)).partition(" at 0x")[0]


def _foreign(cls: type) -> bool:
    return not cls.__module__.startswith("shardow")


def _members(cls: type) -> Iterator[str]:
    for name in sorted(dir(cls)):
        home = next((base for base in cls.__mro__ if name in vars(base)), object)
        if (name.startswith("_") and name not in OWN) or _foreign(home):
            continue
        member = inspect.getattr_static(cls, name)
        plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        yield name + (_called(plain) if inspect.isfunction(plain) else f": {type(member).__name__}")


def _lines(module: ModuleType, prefix: str) -> Iterator[str]:
    yield f"{prefix}: {', '.join(sorted(module.__all__))}"
    yield (
        f"dir({prefix}): "
        f"{', '.join(name for name in sorted(dir(module)) if not name.startswith('_') and name in module.__all__)}"
    )
    for name in sorted({*module.__all__, *(["open"] if module is shardow else [])}):
        found = getattr(module, name)
        if inspect.isclass(found):
            bases = [
                base.__name__
                for base in found.__mro__[1:-1]
                if base.__name__ in shardow.errors.__all__ or _foreign(base)
            ]
            yield f"{prefix}.{name}({', '.join(bases)})"
            yield from (f"{prefix}.{name}.{line}" for line in _members(found))
        elif inspect.isfunction(found):
            yield f"{prefix}.{name}{_called(found)}"
        elif not inspect.ismodule(found):
            yield f"{prefix}.{name}: {type(found).__name__}"


def public_names() -> list[str]:
    homes = ["shardow", *(f"shardow.{name}" for name in ("errors", "schedules", "memory", "posthoc", "compat"))]
    homes += [f"shardow.compat.{name}" for name in sorted(shardow.compat.__all__)]
    modules = [importlib.import_module(home) for home in homes]  # all of them before compat is asked for its own
    return [line for home, module in zip(homes, modules, strict=True) for line in _lines(module, home)]


def test_names_and_signatures_are_as_recorded() -> None:
    found, recorded = public_names(), RECORD.read_text().splitlines()
    changed = [f"- {line}" for line in sorted(set(recorded) - set(found))] + [
        f"+ {line}" for line in sorted(set(found) - set(recorded))
    ]
    assert changed == [], "if this is meant: python python/tests/test_public_names.py"


if __name__ == "__main__":
    RECORD.write_text("\n".join(public_names()) + "\n")
