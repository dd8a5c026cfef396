"""Compares a source, a state to load for example, with its target: which tensor of one is which of the other, what is
missing, unexpected or of another form. Everything that compares states and words the differences uses it. A tensor is
matched by its own name, then by a tied tensor's other names, then by names without what wrappers, DDP and PEFT insert.
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

#: Ends the message where the source has other parts of tensors than this rank's.
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
    """A comparison. ``keys``: {name in the target: key in the source}; ``missing``: names in the target alone;
    ``unexpected``: keys in the source alone; ``different``: (name, its form in the target, its form in the source);
    ``elsewhere``: names of which the source has another part.
    """

    keys: dict[str, str]
    missing: list[str]
    unexpected: list[str]
    different: list[tuple[str, T, T]]
    elsewhere: list[str] = field(default_factory=list)

    def text(self, where: str, target: str = "here") -> str:
        """Describes what does not fit: the first tensors of each kind and how many more; "" where all fits. ``where``
        and ``target`` are texts for the source and the target.
        """
        texts = [f"'{name}' {_difference(a, b, where, target)}" for name, a, b in self.different[:SHOWN]]
        if more := len(self.different) - len(texts):
            texts.append(f"{more} more differ")
        for kind, names in (
            ("missing", self.missing), ("unexpected", self.unexpected), ("sharded otherwise", self.elsewhere),
        ):  # fmt: skip
            texts += [f"{kind} in {where}: {first_of(names)}"] if names else []
        return "; ".join(texts)

    def refuse(
        self, what: str, where: str, also: type[Exception] | None = None, *, target: str = "here",
        done: str = "nothing was loaded", hint: str = "",
    ) -> None:  # fmt: skip
        """Raises a ValueError that is also an ``also`` where something does not fit. ``what``: the call, or "";
        ``done``: its outcome; ``hint``: advice.
        """
        if text := self.text(where, target):
            hint = RESHARDS if self.elsewhere else hint
            raise invalid(
                f"{what}{': ' if what else ''}{where} does not fit, {done}: {text}{'. ' if hint else ''}{hint}", also
            )

    def joined(self, others: Iterable[Fit[T]]) -> Fit[T]:
        """Returns this comparison joined with others of the same names; each finding comes once."""
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


def _difference(form: object, other: object, where: str, target: str) -> str:
    if isinstance(form, Form) and isinstance(other, Form) and form.shape == other.shape:
        cast = "" if other.dtype.is_floating_point == form.dtype.is_floating_point else ", and only floating numbers"
        return f"is {other.dtype} in {where} and {form.dtype} {target}{cast and cast + ' are cast'}"
    shapes = [_shape(value) for value in (other, form)]
    if other is None or form is None:
        return f"is no tensor in {where}" if other is None else f"is no tensor {target}"
    if None not in shapes and shapes[0] != shapes[1]:
        return f"has shape {shapes[0]} in {where} and {shapes[1]} {target}"
    return f"is {other} in {where} and {form} {target}"


def _shape(form: object) -> list[int] | None:
    """Returns the shape of a form: a Form's, a region's, or a plain shape."""
    shape = getattr(form, "shape", form)
    return list(shape) if isinstance(shape, Sequence) else None


def compare(target: Mapping[str, T], source: Mapping[str, T]) -> Fit[T]:
    """Compares tensors of the same names. A form is any value that must be equal: a shape, a region."""
    keys = {name: name for name in target if name in source}
    different = [(name, target[name], source[name]) for name in keys if not _same(target[name], source[name])]
    missing = [name for name in target if name not in source]
    return Fit(keys, missing, [name for name in source if name not in target], different)


def fit(held: LocalState, state: Mapping[str, object], where: str) -> Fit[Form | None]:
    """Compares tensors by the names that matched() pairs; values that are no tensors have the form None."""
    keys = matched(held, state, where)
    forms = {part.name: Form(tuple(part.region.shape), part.flat.dtype) for part in held.parts}
    compared = compare(forms, {name: _form_of(state[key]) for name, key in keys.items()})
    return replace(compared, keys=keys, unexpected=unexpected(held, keys, state))


def _form_of(value: object) -> Form | None:
    if isinstance(value, Form):
        return value
    return Form(tuple(value.size()), value.dtype) if isinstance(value, torch.Tensor) else None


def _same(form: object, other: object) -> bool:
    return form.takes(other) if isinstance(form, Form) else form == other


def matched(held: LocalState, available: Collection[str], where: str = "the file") -> dict[str, str]:
    """Returns {name: key} of the names with a key among ``available``. Raises where a name could have several keys, or
    a key several names."""
    keys = set(available)
    own = {name for names in held.names.values() for name in names}
    cleaned: dict[str, list[str]] = defaultdict(list)
    for key in sorted(keys - own):  # a key that is itself one of the names matches no other
        cleaned[clean_file_key(key)].append(key)
    pairs: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in dict.fromkeys(part.name for part in held.parts):
        names = held.names[name]
        chosen = next((alias for alias in names if alias in keys), None) or _alike(name, names, cleaned, where)
        if chosen is None:
            continue
        if chosen in taken:
            raise invalid(f"'{chosen}' in {where} could be '{taken[chosen]}' or '{name}' here; rename it there")
        pairs[name], taken[chosen] = chosen, name
    return pairs


def _alike(name: str, names: Collection[str], cleaned: Mapping[str, list[str]], where: str) -> str | None:
    forms = [clean_file_key(alias) for alias in names] + [clean_file_key(without_adapter(alias)) for alias in names]
    keys = next((cleaned[form] for form in forms if form in cleaned), [])
    if len(keys) > 1:
        raise invalid(f"'{name}' could be any of {', '.join(map(repr, keys))} in {where}; rename the keys there")
    return keys[0] if keys else None


def unexpected(held: LocalState, keys: Mapping[str, str], available: Collection[str]) -> list[str]:
    """Returns the keys of no tensor in ``held``. A tied tensor may be ``available`` under all its names."""
    known = doubles(held, keys, available).keys() | keys.values()
    others = set(map(clean_file_key, held.others))
    return [key for key in available if key not in known and clean_file_key(key) not in others]


def doubles(held: LocalState, keys: Mapping[str, str], available: Collection[str]) -> dict[str, str]:
    """Returns {key: name} of further keys of tied tensors, of which ``keys`` has one each."""
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
