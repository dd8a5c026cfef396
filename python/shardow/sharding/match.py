"""Compares a state with what it is for: which tensor there is which here, what is missing, unexpected or of another
form; the one way to compare, and to say what does not fit. A tensor is looked for by its own name, then by a tied
tensor's other names, then by names without what wrappers, DDP and PEFT put into them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import torch

from shardow.base.checks import SHOWN, first_of, invalid
from shardow.distributed.gather import LocalShard
from shardow.sharding.local_state import LocalState
from shardow.sharding.names import clean_file_key, without_adapter

T = TypeVar("T")
_BLOCK = 1 << 20  # elements that are compared at a time

#: Ends the message where parts of tensors are other parts than this rank's.
RESHARDS = (
    "A state_dict() is one rank's part: load it through torch.distributed.checkpoint or shardow's files, which "
    "reshard, or pass full tensors, those of full_state_dict() for example"
)


class Form(NamedTuple):
    """Shape and dtype of a tensor. Floating tensors are cast, so their dtypes need not be equal."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def takes(self, other: object) -> bool:
        if not isinstance(other, Form) or other.shape != self.shape:
            return False
        return self.dtype == other.dtype or (self.dtype.is_floating_point and other.dtype.is_floating_point)


@dataclass
class Fit(Generic[T]):
    """A comparison. ``keys``: {name here: key there}; ``missing``: names that are only here; ``unexpected``: keys that
    are only there; ``different``: (name, its form here, its form there); ``elsewhere``: names of which the other side
    has another part.
    """

    keys: dict[str, str]
    missing: list[str]
    unexpected: list[str]
    different: list[tuple[str, T, T]]
    elsewhere: list[str] = field(default_factory=list)

    def text(self, where: str, here: str = "here") -> str:
        """Returns what does not fit: the first tensors of each kind and how many more; "" where all fits. ``where``,
        ``here``: what the two sides are called.
        """
        texts = [f"'{name}' {_difference(a, b, where, here)}" for name, a, b in self.different[:SHOWN]]
        if more := len(self.different) - len(texts):
            texts.append(f"{more} more differ")
        for kind, names in (
            ("missing", self.missing), ("unexpected", self.unexpected), ("sharded otherwise", self.elsewhere),
        ):  # fmt: skip
            texts += [f"{kind} in {where}: {first_of(names)}"] if names else []
        return "; ".join(texts)

    def refuse(
        self, what: str, where: str, also: type[Exception] | None = None, *, here: str = "here",
        done: str = "nothing was loaded", hint: str = "",
    ) -> None:  # fmt: skip
        """Raises ValueError, that is also an ``also``, where something does not fit. ``what``: the call, or "";
        ``done``: what came of it; ``hint``: what to do.
        """
        if text := self.text(where, here):
            hint = RESHARDS if self.elsewhere else hint
            raise invalid(
                f"{what}{': ' if what else ''}{where} does not fit, {done}: {text}{'. ' if hint else ''}{hint}", also
            )

    def joined(self, others: Iterable[Fit[T]]) -> Fit[T]:
        """Returns this one with what others of the same names lack, each name once."""
        missing, unexpected, different = dict.fromkeys(self.missing), dict.fromkeys(self.unexpected), self.different[:]
        elsewhere = dict.fromkeys(self.elsewhere)
        for other in others:
            elsewhere |= dict.fromkeys(other.elsewhere)
            missing |= dict.fromkeys(other.missing)
            unexpected |= dict.fromkeys(other.unexpected)
            different += [entry for entry in other.different if entry not in different]
        return Fit(self.keys, [*missing], [*unexpected], different, [*elsewhere])

    def only_different(self) -> Fit[T]:
        """Returns the comparison without names that one side lacks."""
        return replace(self, missing=[], unexpected=[])


def _difference(ours: object, theirs: object, where: str, here: str) -> str:
    if isinstance(ours, Form) and isinstance(theirs, Form) and ours.shape == theirs.shape:
        cast = "" if theirs.dtype.is_floating_point == ours.dtype.is_floating_point else ", and only floating numbers"
        return f"is {theirs.dtype} in {where} and {ours.dtype} {here}{cast and cast + ' are cast'}"
    shapes = [_shape(form) for form in (theirs, ours)]
    if theirs is None or ours is None:
        return f"is no tensor in {where}" if theirs is None else f"is no tensor {here}"
    if None not in shapes and shapes[0] != shapes[1]:
        return f"has shape {shapes[0]} in {where} and {shapes[1]} {here}"
    return f"is {theirs} in {where} and {ours} {here}"


def _shape(form: object) -> list[int] | None:
    """Returns the shape of a form: a Form's, a region's, or a plain shape."""
    shape = getattr(form, "shape", form)
    return list(shape) if isinstance(shape, Sequence) else None


def compare(here: Mapping[str, T], there: Mapping[str, T]) -> Fit[T]:
    """Compares tensors of the same names. A form is whatever must be equal: a shape, a region."""
    keys = {name: name for name in here if name in there}
    different = [(name, here[name], there[name]) for name in keys if not _same(here[name], there[name])]
    missing, unexpected = [name for name in here if name not in there], [name for name in there if name not in here]
    return Fit(keys, missing, unexpected, different)


def fit(held: LocalState, state: Mapping[str, object], where: str) -> Fit[Form | None]:
    """Compares tensors of names as matched() finds them; None is the form of what is no tensor."""
    keys = matched(held, state, where)
    here = {part.name: Form(tuple(part.region.shape), part.flat.dtype) for part in held.parts}
    found = compare(here, {name: _form_of(state[key]) for name, key in keys.items()})
    return replace(found, keys=keys, unexpected=unexpected(held, keys, state))


def _form_of(value: object) -> Form | None:
    if isinstance(value, Form):
        return value
    return Form(tuple(value.size()), value.dtype) if isinstance(value, torch.Tensor) else None


def _same(here: object, there: object) -> bool:
    return here.takes(there) if isinstance(here, Form) else here == there


def matched(held: LocalState, available: Collection[str], where: str = "the file") -> dict[str, str]:
    """{name here: key there}, of those that have a counterpart. Raises where there are several, here or there."""
    there = set(available)
    own = {name for names in held.names.values() for name in names}
    cleaned: dict[str, list[str]] = defaultdict(list)
    for key in sorted(there - own):  # what is called as something here is nothing else
        cleaned[clean_file_key(key)].append(key)
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in dict.fromkeys(part.name for part in held.parts):
        names = held.names[name]
        chosen = next((alias for alias in names if alias in there), None) or _alike(name, names, cleaned, where)
        if chosen is None:
            continue
        if chosen in taken:
            raise invalid(f"'{chosen}' in {where} could be '{taken[chosen]}' or '{name}' here; rename it there")
        found[name], taken[chosen] = chosen, name
    return found


def _alike(name: str, names: Collection[str], cleaned: Mapping[str, list[str]], where: str) -> str | None:
    forms = [clean_file_key(alias) for alias in names] + [clean_file_key(without_adapter(alias)) for alias in names]
    keys = next((cleaned[form] for form in forms if form in cleaned), [])
    if len(keys) > 1:
        raise invalid(f"'{name}' could be any of {', '.join(map(repr, keys))} in {where}; rename the keys there")
    return keys[0] if keys else None


def unexpected(held: LocalState, keys: Mapping[str, str], available: Collection[str]) -> list[str]:
    """Returns what is there and not here. A tied tensor may be there under all its names."""
    known = doubles(held, keys, available).keys() | keys.values()
    others = set(map(clean_file_key, held.others))
    return [key for key in available if key not in known and clean_file_key(key) not in others]


def doubles(held: LocalState, keys: Mapping[str, str], available: Collection[str]) -> dict[str, str]:
    """Returns {key there: name here} of further names of tied tensors, of which ``keys`` has one each."""
    taken = set(keys.values())
    forms = {key: clean_file_key(key) for key in available if key not in taken}
    used = set(map(clean_file_key, taken if forms else ()))
    names = {clean_file_key(alias): name for name in (keys if forms else ()) for alias in held.names[name]}
    return {key: names[form] for key, form in forms.items() if form in names and form not in used}


def refuse_untied(
    held: LocalState, keys: Mapping[str, str], available: Collection[str], read: Callable[[LocalShard], None]
) -> None:
    """Raises ValueError where a source has other values under another name of a tied tensor. Compares this rank's
    parts, in blocks, which ``read()`` fills from the tensor of their name."""
    parts = {part.name: part for part in held.parts}
    for key, name in doubles(held, keys, available).items():
        _, flat, region = parts[name]
        for begin in range(0, region.size, _BLOCK):
            window = region.window(begin, min(begin + _BLOCK, region.size))
            blocks = torch.empty(2, window.size, dtype=flat.dtype, device="cpu")
            read(LocalShard(keys[name], blocks[0], window))
            read(LocalShard(key, blocks[1], window))
            if not torch.equal(*blocks.view(torch.uint8)):
                names = f"'{keys[name]}' and '{key}' differ in the source, and are one tensor here"
                raise invalid(f"{names}, '{name}'; untie them here, or leave one of them out there")
