"""Which tensor of a source is which of a model's.

Looked for is its own name, then a tied tensor's other names, then names without what wrappers, DDP and PEFT put into them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardow.base.checks import invalid
from shardow.model.names import clean_file_key, without_adapter
from shardow.model.parts import Held

Form = tuple[tuple[int, ...], torch.dtype]  # shape and dtype


def matched(held: Held, available: Collection[str], where: str = "the file") -> dict[str, str]:
    """{name here: key there}, of those that have a counterpart. Raises where there are several, here or there."""
    there = set(available)
    own = {name for names in held.names.values() for name in names}
    cleaned: dict[str, list[str]] = defaultdict(list)
    for key in sorted(there - own):  # what is called as something here is nothing else
        cleaned[clean_file_key(key)].append(key)
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for part in held.parts:
        names = held.names[part.name]
        exact = next((name for name in names if name in there), None)
        chosen = _alike(part.name, names, cleaned, where) if exact is None else exact
        if chosen is None:
            continue
        if chosen in taken:
            raise invalid(f"'{chosen}' in {where} could be '{taken[chosen]}' or '{part.name}' here; rename it there")
        found[part.name], taken[chosen] = chosen, part.name
    return found


def _alike(name: str, names: Collection[str], cleaned: Mapping[str, list[str]], where: str) -> str | None:
    forms = [clean_file_key(alias) for alias in names] + [clean_file_key(without_adapter(alias)) for alias in names]
    keys = next((cleaned[form] for form in forms if form in cleaned), [])
    if len(keys) > 1:
        raise invalid(f"'{name}' could be any of {', '.join(map(repr, keys))} in {where}; rename the keys there")
    return keys[0] if keys else None


def unexpected(held: Held, keys: Mapping[str, str], available: Collection[str]) -> list[str]:
    """What is there and not here. A tied tensor may be there under all its names: one of them is read."""
    used = set(keys.values())
    others = {clean_file_key(alias) for names in held.names.values() for alias in names} - set(map(clean_file_key, used))
    return [key for key in available if key not in used and clean_file_key(key) not in others]


@dataclass(frozen=True)
class Comparison:
    keys: dict[str, str]  # {name here: key there}
    missing: list[str]  # of those that are wanted
    kept: list[str]  # have values, which stay
    unexpected: list[str]

    def report(self) -> dict[str, Any]:
        return {"missing": self.missing, "unexpected": self.unexpected, "kept": self.kept}


def compared(what: str, held: Held, wanted: Collection[str], source: Mapping[str, Form], strict: bool) -> Comparison:
    """``wanted``: names without values.

    Raises with everything that does not fit; without ``strict`` only with what can't be cast or has another shape.
    """
    keys = matched(held, source, "the source")
    found = Comparison(
        keys,
        [part.name for part in held.parts if part.name not in keys and part.name in wanted],
        [part.name for part in held.parts if part.name not in keys and part.name not in wanted],
        unexpected(held, keys, source),
    )
    wrong = [
        text
        for part in held.parts
        if part.name in keys
        for text in _differences(part.name, part.region.shape, part.flat.dtype, source[keys[part.name]])
    ]
    if strict and found.missing:
        wrong.append(f"missing in the source: {', '.join(found.missing[:20])}")
    if strict and found.unexpected:
        wrong.append(f"unexpected in the source: {', '.join(found.unexpected[:20])}")
    if wrong:
        raise invalid(f"{what}: the source does not fit: {'; '.join(wrong[:20])}")
    return found


def _differences(name: str, shape: tuple[int, ...], dtype: torch.dtype, there: Form) -> list[str]:
    found = []
    if tuple(there[0]) != tuple(shape):
        found.append(f"'{name}' has shape {list(there[0])} in the source and {list(shape)} here")
    if there[1] != dtype and not (there[1].is_floating_point and dtype.is_floating_point):
        found.append(f"'{name}' is {there[1]} in the source and {dtype} here, and only floating numbers are cast")
    return found
