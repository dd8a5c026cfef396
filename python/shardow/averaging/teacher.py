"""A teacher: averages in the parameters of a module that training calls, or in tensors of a mapping. There is no second
set of them."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from shardow.averaging.options import DTYPES, Options
from shardow.averaging.tracked import Tracked
from shardow.base.checks import first_of, invalid, one_of, unsupported
from shardow.distributed.gather import LocalShard
from shardow.sharding.fsdp_ownership import has_fsdp
from shardow.sharding.local import oddity
from shardow.sharding.local_state import Saveable, held_by
from shardow.sharding.match import compare
from shardow.sharding.slots import slots
from shardow.sharding.storage import address_of
from shardow.sharding.view import ModelView

Begin = Literal["student", "teacher"]
#: Maps a tensor's name in the student to its name in the teacher.
Names = Callable[[str], str] | Mapping[str, str]

_CALL = "EMA(averages=...)"
_YOURSELF = "copy the model yourself, then EMA(model, averages=the_copy)"
_LIKE = "Make the teacher as the student is made: copy.deepcopy() of the module, then the same sharding"

#: Maps an address to the Teacher whose average lies there, which keeps that memory.
_teachers: weakref.WeakValueDictionary[int, Teacher] = weakref.WeakValueDictionary()


class _Wait:
    """A hook of a teacher's forward, which waits for the averages; that of a copy, or of what torch.save() saved,
    waits for nothing."""

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        self._wait = (lambda: None) if wait is None else weakref.WeakMethod(wait)

    def __call__(self, *_: object) -> None:
        if (wait := self._wait()) is not None:
            wait()

    def __reduce__(self) -> tuple[type[_Wait], tuple[()]]:
        return _Wait, ()


class Teacher:
    """Averages in a teacher's own memory. Names are those of the student."""

    def __init__(self, teacher: Saveable, names: Names | None, begin: Begin) -> None:
        """``begin``: which of the two gives the averages their first values."""
        self.module, self._begin = teacher, begin
        self._name = names if callable(names) else lambda name: (names or {}).get(name, name)

    def find(self, student: ModelView) -> torch.dtype:
        """Returns the dtype of the averages. Raises where the teacher can't hold any."""
        one_of("begin", self._begin, get_args(Begin))
        self._student, self._held = student, held_by(self.module, student.process_group, saving=False)
        self._parts = {alias: part for part in self._held.parts for alias in self._held.names[part.name]}
        if self._held.copied:
            raise unsupported(f"{_CALL}: some of the teacher is not contiguous; p.data = p.data.contiguous() first")
        self._trained = set[str]()
        if (view := self._held.view) is not None:
            view.watch_buffers, self._trained = True, {local.name for local in view.parameters if local.requires_grad}
            # Keeps a second reference to each parameter: without one torch takes the interpreter's lock twice per look.
            frozen = (p for p in view.model.parameters() if type(p) is nn.Parameter and not p.requires_grad)
            dense = (p for p in frozen if p.dtype in DTYPES and p.layout is torch.strided)
            self._references = [to_dlpack(p) for p in dense if p.device.type in ("cpu", "cuda")]
        parts = (self._part(weight.name) for weight in student.parameters)
        return next((part.flat.dtype for part in parts if part is not None), torch.float32)

    def _part(self, name: str) -> LocalShard | None:
        return self._parts.get(self._name(name))

    def take(self, tracked: Sequence[Tracked], options: Options) -> None:
        """Makes the teacher's tensors the averages of ``tracked``; writes nothing. Raises where a tensor is missing, or
        is another part."""
        if len(options.schedules) > 1 or (options.device is not None and not all(row.averages for row in tracked)):
            raise invalid(f"{_CALL}: a teacher has one average, with its weights; leave device= and further decays out")
        if options.replicas == "split" and any(row.local.replicas for row in tracked):
            raise invalid(f"{_CALL}: every replica has the whole teacher, and averages it: replicas='copy'")
        self._copies_buffers = options.buffers != "ignore"
        parts = {row.name: part for row in tracked if (part := self._part(row.name)) is not None}
        regions = {name: part.region for name, part in parts.items()}
        compare({row.name: row.region for row in tracked}, regions).refuse(
            _CALL, "the teacher", target="in the student", done="nothing was made", hint=_LIKE
        )
        if learns := [part.name for part in parts.values() if part.name in self._trained]:
            means = "averages are not: teacher.requires_grad_(False)"
            raise invalid(f"{_CALL}: {first_of(learns)} of the teacher would be trained, and {means}")
        alike = all(self._part(name) is parts[row.name] for row in tracked for name in row.local.aliases)
        if not alike or len({id(part) for part in parts.values()}) < len(parts):
            raise invalid(f"{_CALL}: other tensors are tied in the teacher than in the student. {_LIKE}")
        own = {address_of(row.local.tensor) for row in tracked} - {0}
        for row in tracked:
            flat = parts[row.name].flat
            if flat.dtype != options.dtype or flat.device != row.local.tensor.device:
                raise unsupported(
                    f"{_CALL}: '{row.name}' is {flat.dtype} on {flat.device} in the teacher; averages are of one "
                    f"dtype, {options.dtype} here, and lie with their weights, on {row.local.tensor.device}"
                )
            if (address := address_of(flat)) in own or address in _teachers:
                whose = "the student's own" if address in own else "another EMA's average"
                raise invalid(f"{_CALL}: '{row.name}' of the teacher is {whose}; {_LIKE}")
        self._averaged = {row.name for row in tracked}
        for row in tracked:
            row.averages = [parts[row.name].flat]
            _teachers[address_of(row.averages[0])] = self
        _teachers.pop(0, None)  # of empty parts

    def start(self, copy: Callable[[], None], wait: Callable[[], None] | None) -> None:
        """Gives the averages their first values, by ``copy()`` of the weights, when all ranks have a teacher that fits.
        Each forward calls ``wait()`` first."""
        if self._begin == "student":
            self._copy((weight.name, weight.flat()) for weight in self._student.parameters)  # frozen weights
            copy()
        if wait is not None and self._held.view is not None:
            for module in self._held.view.model.modules():  # a submodule may be called alone
                module.register_forward_pre_hook(_Wait(wait), prepend=True)

    def _copy(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in values:
            part = self._part(name) if name not in self._averaged else None
            if part is not None and part.flat.shape == value.shape:
                part.flat.copy_(value)

    def refuse_moved(self) -> None:
        """Raises where the averages are not the teacher's any more."""
        if self._held.view is not None and not self._held.view.unchanged_at_rest():
            raise invalid(
                "the teacher's tensors were moved or replaced since this EMA was made, and hold its averages no more. "
                "Load a checkpoint into the teacher that is there: make EMA(student, averages=teacher) anew, and load()"
            )

    def refuse_optimizer(self, optimizer: Any) -> None:
        """Raises where ``optimizer`` would train the averages."""
        parameters = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
        if any(_teachers.get(address_of(getattr(p, "_local_tensor", p).detach())) is self for p in parameters):
            raise invalid(f"attach(): {type(optimizer).__name__} holds parameters of the teacher, which are averages")

    def written(self) -> None:
        """Copies the student's buffers after averages were written, and frees unsharded copies of their old values."""
        if self._copies_buffers:
            self._copy((buffer.name, buffer.flat()) for buffer in self._student.buffers)
        self._held.put_back()


def copy_over(model: nn.Module, tracked: Sequence[Tracked]) -> nn.Module:
    """Returns a copy of the model whose averaged tensors are the averages; nothing is copied for them."""
    rows = {name: row for row in tracked for name in (row.name, *row.local.aliases)}
    if has_fsdp(model) or any(hasattr(slot.recorded, "_local_tensor") for slot in slots(model)):
        raise unsupported("module(): the model is sharded; make the teacher like it, and EMA(model, averages=teacher)")
    if divided := [row.name for row in tracked if not row.is_whole]:
        raise invalid(f"module(): {first_of(divided)} is divided among replicas; EMA(model, replicas='copy')")
    if any(row.is_offloaded or row.is_copied or len(row.averages) > 1 for row in tracked):
        raise unsupported("module(): a teacher has one average, beside its weights; leave device= and more decays out")
    copies: dict[int, torch.Tensor] = {}
    for slot in slots(model):
        value, row = slot.recorded.detach(), rows.get(slot.name)
        if row is not None:
            value = row.averages[0].view(value.shape)
        elif value.is_floating_point() and not oddity(value):
            value = value.to(tracked[0].averages[0].dtype, memory_format=torch.contiguous_format, copy=True)
        else:
            continue
        copies[id(slot.recorded)] = nn.Parameter(value, False) if slot.kind == "parameter" else value
    made, in_place = copy.deepcopy(model, dict(copies)), {id(tensor) for tensor in copies.values()}
    shared = {id(slot.recorded) for slot in slots(model)} & {id(slot.recorded) for slot in slots(made)}
    if shared or any(id(slot.recorded) not in in_place for slot in slots(made) if slot.name in rows):
        raise unsupported(f"module(): a module with a __deepcopy__() that copies otherwise; {_YOURSELF}")
    if any(inspect.isfunction(vars(module).get("forward")) for module in made.modules()):
        raise unsupported(f"module(): a module whose forward is replaced (torch.compile(model.forward)); {_YOURSELF}")
    return made.requires_grad_(False)
