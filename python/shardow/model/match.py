"""A state beside what it is for: which tensor there is which here, what is missing, unexpected or of another form. The
one way to compare. Looked for is a tensor's own name, then a tied tensor's other names, then names without what
wrappers, DDP and PEFT put into them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from shardow.base.checks import invalid
from shardow.model.names import clean_file_key, without_adapter
from shardow.model.parts import Held

T = TypeVar("T")


class Form(NamedTuple):
    """What must fit of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Fit(Generic[T]):
    """``missing``: here, not there; ``unexpected``: there, not here; ``different``: (name, its form here, its form
    there).
    """

    keys: dict[str, str]  # {name here: key there}
    missing: list[str]
    unexpected: list[str]
    different: list[tuple[str, T, T]]


def compare(here: Mapping[str, T], there: Mapping[str, T]) -> Fit[T]:
    """Of the same names. A form is whatever must be equal: a shape, a region."""
    return _fit(
        {name: name for name in here if name in there}, here, there, [name for name in there if name not in here]
    )


def fit(held: Held, state: Mapping[str, object], where: str) -> Fit[Form | None]:
    """Of names as matched() finds them; None is the form of what is no tensor."""
    keys = matched(held, state, where)
    here = {part.name: Form(tuple(part.region.shape), part.flat.dtype) for part in held.parts}
    return _fit(keys, here, {key: form_of(state[key]) for key in keys.values()}, unexpected(held, keys, state))


def form_of(value: object) -> Form | None:
    if isinstance(value, Form):
        return value
    return Form(tuple(value.size()), value.dtype) if isinstance(value, torch.Tensor) else None


def _fit(keys: dict[str, str], here: Mapping[str, T], there: Mapping[str, T], unexpected: list[str]) -> Fit[T]:
    different = [(name, here[name], there[key]) for name, key in keys.items() if here[name] != there[key]]
    return Fit(keys, [name for name in here if name not in keys], unexpected, different)


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
    rest = [key for key in available if key not in used]
    if not rest:
        return []
    others = {clean_file_key(alias) for names in held.names.values() for alias in names} - set(
        map(clean_file_key, used)
    )
    return [key for key in rest if clean_file_key(key) not in others]
