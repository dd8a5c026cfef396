"""What constructors write into weights that are on meta: recorded under meta_init(), done again by materialize() where
there is memory.

A module's own ``reset_parameters()`` is called again whole, so only what comes after it is kept, call by call: of
torch.nn.init, in-place methods (``weight.data.zero_()``), assignments to parts. What a constructor put into a parameter
when it made it (``nn.Parameter(torch.zeros(3))``) is kept too: a number where all elements are equal, else the tensor,
up to 8 MiB of it.

Numbered, as the code below:

1. a tensor that a module registers gets a Record, in the module's own dict, so that deep copies of the module have
   theirs
2. torch tells this mode of every call; those that write into a recorded tensor, or a view of it, are found by the
   storage
3. a call that writes all of a tensor makes everything before it void
4. replay(): the calls again, on whole memory: what it was made with, reset_parameters(), what came after
"""

from __future__ import annotations

import ctypes
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from shardow.sharding.storage import storage_key

MOST = 8 << 20  # bytes of a tensor that is kept as it is
PATTERN = 0xAA  # of bytes that nobody wrote: -3e-13 in float32
_KEY = "_shardow_recorded"  # of a module's dict
_HEAD = 64  # bytes that tell memory without values
_PATTERN_BYTES = bytes([PATTERN]) * _HEAD
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_WHOLE = {
    "copy_", "fill_", "zero_", "zeros_", "ones_", "constant_", "normal_", "uniform_", "exponential_", "geometric_",
    "log_normal_", "cauchy_", "random_", "bernoulli_", "trunc_normal_", "eye_", "eye", "dirac_", "xavier_uniform_",
    "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "orthogonal_", "sparse_",
}  # fmt: skip


@dataclass(frozen=True)
class View:
    """Of a recorded tensor's elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(whole, self.size, self.stride, self.offset)


@dataclass(frozen=True)
class Call:
    """``whole``: it writes all of the tensor. ``problem``: why it can't be done again. ``strides``: of the tensor that
    the arguments are views of; (): row by row."""

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), {})
    problem: str | None = None
    whole: bool = True
    strides: tuple[int, ...] = ()


_ASSIGNED = Call(torch.Tensor.copy_, problem="its .data was assigned")


@dataclass
class Record:
    """``made``: with what values; ``reset``: then the module's reset_parameters() wrote it; ``calls``: what came
    after. ``twins``: deep copies have the same, and begin with the same random numbers."""

    tensor: int  # its id, by which a deep copy is found
    numel: int
    made: list[Call] = field(default_factory=list)
    reset: bool = False
    calls: list[Call] = field(default_factory=list)
    twins: object | None = None
    source: torch.Tensor | None = None  # has the version of what it was made from, without the memory
    version: int = 0  # of that when it was recorded

    @property
    def has_values(self) -> bool:
        return self.reset or bool(self.made) or any(call.whole for call in self.calls)

    @property
    def problem(self) -> str | None:
        if self.source is not None and self.source._version != self.version:
            return "what the module was given for it was written to afterwards"
        return next((call.problem for call in [*self.made, *self.calls] if call.problem), None)

    def replay(self, whole: torch.Tensor, calls: Iterable[Call]) -> None:
        """Makes the calls, ``made`` or ``calls``, on memory in the order that the constructor's had."""
        for call in calls:
            strides = call.strides or whole.stride()
            memory = whole if strides == whole.stride() else whole.new_empty_strided(whole.shape, strides).copy_(whole)
            args, kwargs = tree_map(lambda view: view.of(memory) if isinstance(view, View) else view, call.arguments)  # noqa: B023
            call.function(*args, **kwargs)
            whole.copy_(memory)

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        self.twins = self.twins or object()
        copy = replace(self, made=list(self.made), calls=list(self.calls))
        copied = memo.get(self.tensor)
        recorders = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, Recorder)]
        if isinstance(copied, torch.Tensor) and recorders and copied.is_meta:
            recorders[-1].watch(copied, copy)
        return copy


def records_of(module: nn.Module) -> dict[str, Record]:
    """By key, of a module's own parameters and buffers."""
    return module.__dict__.get(_KEY, {})  # type: ignore[no-any-return]


def forget(module: nn.Module) -> None:
    module.__dict__.pop(_KEY, None)


class Recorder(TorchFunctionMode):
    """While it is on, of this thread."""

    def __init__(self) -> None:
        super().__init__()
        # The tensor keeps the storage's address from others.
        self._by_storage: dict[int, tuple[torch.Tensor, Record, list[nn.Module]]] = {}
        self._computed: dict[int, tuple[torch.Tensor, str]] = {}  # of recorded tensors, and how; by storage, too
        self._frame: types.FrameType | None = None  # of torch.nn.init, which is recorded already

    def watch(self, tensor: torch.Tensor, record: Record, module: nn.Module | None = None) -> None:
        record.tensor = id(tensor)
        known = self._by_storage.get(storage_key(tensor))
        modules = [*(known[2] if known else []), *([module] if module is not None else [])]
        self._by_storage[storage_key(tensor)] = (tensor, record, modules)

    def register(self, module: nn.Module, key: str, given: torch.Tensor, now: torch.Tensor) -> None:  # (1)
        """``given`` has become ``now``, on meta, in the module."""
        known = self._by_storage.get(storage_key(now))
        record = known[1] if known is not None else Record(id(now), now.numel())
        if known is None and (computed := self._computed.get(storage_key(now))):
            record.made = [Call(torch.Tensor.copy_, problem=f"{computed[1]} of a tensor on meta")]
        elif known is None and not given.is_meta:
            record.made = [] if without_values(given) else [_kept(given)]
            record.source, record.version = given.detach(), given._version
            record.source.data = given.new_empty(0)
        module.__dict__.setdefault(_KEY, {})[key] = record
        self.watch(now, record, module)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # (2)
        kwargs = kwargs or {}
        name, caller = getattr(func, "__name__", ""), sys._getframe(1)
        tensors = _on_meta((args, kwargs))
        before = [(tensor._version, storage_key(tensor)) for tensor in tensors]
        result = func(*args, **kwargs)
        if name in _EMPTY:
            _mark(result)
            return result
        # Functions of torch.nn.init that see a tensor on meta may return without a call that writes.
        is_init = caller.f_globals.get("__name__") == "torch.nn.init"
        for tensor, (version, address) in zip(tensors, before, strict=True):
            if is_init or tensor._version != version:
                self._written(tensor, func, name, args, kwargs, tensor._version != version)
            if storage_key(tensor) != address and (known := self._by_storage.get(address)):  # .data was assigned
                if caller.f_code is not nn.Module._apply.__code__:  # which casts
                    known[1].made, known[1].calls, known[1].reset = [_ASSIGNED], [], False
                self._by_storage.setdefault(storage_key(tensor), known)
        if any(address in self._by_storage or address in self._computed for _, address in before):
            self._computed.update({storage_key(made): (made, name) for made in _on_meta(result)})
        return result

    def _written(self, target: torch.Tensor, func: Any, name: str, args: Any, kwargs: Any, writes: bool) -> None:
        known = self._by_storage.get(storage_key(target))
        if known is None:
            return
        _, record, modules = known
        init, reset = _callers(modules)
        if init is not None:
            if init is self._frame:
                return  # one of several steps
            self._frame = init
            name, func = init.f_code.co_name, getattr(nn.init, init.f_code.co_name)
            names, _, _, values = inspect.getargvalues(init)
            args, kwargs = (), {key: values[key] for key in names}
            target = kwargs.get("tensor", target)
        elif not writes:
            return
        whole = name in _WHOLE and target.numel() == record.numel
        if whole:  # (3)
            record.made, record.calls, record.reset, record.twins, record.source = [], [], False, None, None
        if reset:
            record.reset, record.calls = True, []
        else:
            record.calls.append(replace(self._call(func, name, args, kwargs, record, whole), strides=known[0].stride()))

    def _call(self, func: Any, name: str, args: Any, kwargs: Any, record: Record, whole: bool) -> Call:
        problems: list[str] = []

        def keep(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if not value.is_meta:
                if value.nbytes > MOST:
                    problems.append(f"{name} with a tensor of {value.nbytes >> 20} MiB, more than meta_init() keeps")
                return value.detach().clone() if not problems else None
            known = self._by_storage.get(storage_key(value))
            if known is None or known[1] is not record:
                problems.append(f"{name} with a tensor that is on meta itself")
                return None
            return View(tuple(value.size()), value.stride(), int(value.storage_offset()))

        arguments = tree_map(keep, (tuple(args), dict(kwargs)))
        return Call(func, arguments, problems[0] if problems else None, whole)


def _on_meta(tree: Any) -> list[torch.Tensor]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_meta]
    return [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_inference()]


def without_values(tensor: torch.Tensor) -> bool:
    """Memory as torch.empty() gave it, which nobody wrote since. The beginning mostly tells."""
    size = _head_bytes(tensor)
    return size > 0 and ctypes.string_at(tensor.data_ptr(), size) == _PATTERN_BYTES[:size]


def _mark(tensor: Any) -> None:
    if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and (size := _head_bytes(tensor)):
        ctypes.memset(tensor.data_ptr(), PATTERN, size)


def _head_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes to look at: of plain memory on the CPU, where no call of torch is needed, which costs a hundred
    times as much; else 0."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu"
    if not plain or tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.data_ptr() == 0:
        return 0
    return min(max(_HEAD // tensor.itemsize, 1), tensor.numel()) * tensor.itemsize


def _kept(given: torch.Tensor) -> Call:
    values = given.detach()
    whole = View(tuple(values.size()), torch.empty(values.size(), device="meta").stride(), 0)
    uniform = values.numel() and bool((values == values.reshape(-1)[0]).all())
    if not uniform and values.nbytes > MOST:
        made = f"{values.nbytes >> 20} MiB of values itself"
        return Call(torch.Tensor.copy_, problem=f"its constructor made {made}, more than meta_init() keeps")
    return Call(torch.Tensor.copy_, ((whole, (values.reshape(-1)[0] if uniform else values).clone()), {}))


def _callers(modules: list[nn.Module]) -> tuple[types.FrameType | None, bool]:
    """(the outermost frame of torch.nn.init that stands now, whether one of the modules' reset_parameters() does)."""
    init, frame = None, sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__") == "torch.nn.init" and not name.startswith("_") and hasattr(nn.init, name):
            init = frame
        if name == "reset_parameters" and any(frame.f_locals.get("self") is one for one in modules):
            return init, True
        frame = frame.f_back  # type: ignore[assignment]
    return init, False
