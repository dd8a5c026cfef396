"""Tensors that are averaged: their local memory, the part of it that this rank averages, and the averages' own memory.
Also tensors that are not."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shardow import _core
from shardow.averaging.options import DTYPES, Options
from shardow.base.checks import first_of, instance, invalid, unsupported, warn
from shardow.distributed.gather import extract_region, place
from shardow.distributed.transfers import empty
from shardow.sharding import storage
from shardow.sharding.equal import Common, common_of
from shardow.sharding.local import refuse_unaverageable

if TYPE_CHECKING:
    from shardow.sharding.local import LocalTensor

_ALIGN = 64  # bytes; averages begin at multiples of it, as the engine's kernels prefer


def arena(
    regions: Sequence[_core.Region], dtype: torch.dtype, count: int, device: torch.device
) -> list[list[torch.Tensor]]:
    """Returns ``count`` averages of each of ``regions``, 1-D and uninitialised, in one allocation; each tensor begins
    at a multiple of 64 bytes."""
    begins, total = [], 0
    for region in regions:
        begins.append(total)
        total += -(-region.size * dtype.itemsize // _ALIGN) * _ALIGN
    stride = _core.arena_stride(total, count) if device.type == "cpu" else total
    memory = _memory((count - 1) * stride + total, device)
    with _disable_current_modes():  # the caller's dispatch modes don't apply
        return [
            [_slice(memory, k * stride + begin, region.size, dtype) for k in range(count)]
            for region, begin in zip(regions, begins, strict=True)
        ]


def _memory(size: int, device: torch.device) -> torch.Tensor | mmap.mmap:
    """Returns uninitialised bytes. On a CPU they are a separate mapping, whose pages take memory when they are first
    written."""
    if device.type == "cpu":
        return mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.empty(size, dtype=torch.uint8, device=device)


def _slice(memory: torch.Tensor | mmap.mmap, begin: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns ``count`` elements. From a mapping, they have a storage of just their size, so that torch.save() writes
    no more."""
    if isinstance(memory, torch.Tensor):
        return memory[begin : begin + count * dtype.itemsize].view(dtype)
    if count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin)


#: A value of `source=`: a tensor of the parameter's local shape, or a stretch: (tensor, first, "global" or "local").
Source = torch.Tensor | tuple[torch.Tensor, int] | tuple[torch.Tensor, int, str]


def _placed(local: LocalTensor, tensor: torch.Tensor, first: int, counted: str = "global") -> tuple[_core.Region, int]:
    """Returns (region, begin) of a stretch: ``tensor``'s elements stand for those of a parameter from ``first`` on, in
    row-major order of the whole parameter, or with ``counted="local"`` of what this rank holds of it. They begin at
    element ``begin`` of the local memory. Raises ValueError where this rank does not hold them."""
    size = tensor.numel()
    if size == 0:
        return local.region.window(0, 0), 0
    begin, end = first, first + size
    if counted == "global" and first >= 0:
        begin, end = local.region.position(begin), local.region.position(end)
    if counted not in ("global", "local") or begin < 0 or end - begin != size or end > local.region.size:
        stretch = f"elements [{first}, {first + size}), counted {counted}"
        holds = f"are not all on this rank, which holds {local.region}; they are counted 'global' or 'local'"
        raise invalid(f"source= of '{local.name}': {stretch}, {holds}")
    return local.region.window(begin, end), begin


@dataclass(slots=True)
class Tracked:
    """One averaged tensor on this rank. ``local`` is the model's; ``region`` the part of local.region that this rank
    averages (all of it unless replicas split the work), which begins at element ``begin`` of the local memory.
    ``averages``: of each decay, region.size elements, 1-D."""

    local: LocalTensor
    region: _core.Region
    begin: int
    _master: torch.Tensor | None = None  # what `source=` names, 1-D
    stretched: bool = False  # an optimizer divides it: `source` has this rank's region alone
    # By replica, (begin, end) in local memory of a stretched tensor.
    owners: dict[int, tuple[int, int]] = field(default_factory=dict)
    averages: list[torch.Tensor] = field(default_factory=list)
    is_offloaded: bool = False  # the averages are on the host, their weights on a device that the engine knows
    is_copied: bool = False  # the averages are on the host, their weights on another device
    by_torch: bool = False  # PyTorch's operations update it
    # This rank's part of weights that are strided, or copied, in order, 1-D: gather() fills it, scatter() writes back.
    stage: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self._find_source()

    @property
    def name(self) -> str:
        return self.local.name

    @property
    def mastered(self) -> bool:
        """Whether `source=` names it."""
        return self._master is not None

    @property
    def source(self) -> torch.Tensor:
        """The tensor that is averaged, all of the local region."""
        return self.local.tensor if self._master is None else self._master

    @property
    def is_whole(self) -> bool:
        """Whether no other rank averages a part of it."""
        return self.region == _core.Region.whole(list(self.region.shape))

    def follow(self) -> None:
        """Follows the model's memory after a move."""
        refuse_unaverageable(self.local)
        self._find_source()

    def _find_source(self) -> None:
        weights = self.local.tensor
        self.stage = None
        if self.local.is_in_order() and not self.is_copied:
            return
        if self.stretched or (self.is_copied and self.mastered):
            raise unsupported(
                f"'{self.name}' has strides {weights.stride()} on {weights.device}, and source= names it; make it "
                "contiguous first, and leave device= out"
            )
        self.stage = empty([self.region.size], weights.dtype, "cpu" if self.is_copied else weights.device)
        self.gather()

    def gather(self) -> None:
        if self.stage is not None:
            extract_region(self.local.tensor, self._window(), self.stage)

    def scatter(self) -> None:
        if self.stage is not None:
            place(self.stage, self._window(), self.local.tensor)

    def weights(self) -> torch.Tensor:
        """Returns the part of the live weights that this rank averages, 1-D: a view, or the stage."""
        return self._part(self.local.tensor.view(-1)) if self.stage is None else self.stage

    def sources(self) -> torch.Tensor:
        """Returns the same part of the tensor that is averaged: the engine reads it."""
        return self.weights() if self._master is None else self._part(self._master)

    def view(self, tensor: torch.Tensor) -> _core.TensorView:
        """Returns the engine's description of this rank's part in ``tensor``, contiguous torch memory."""
        if self.by_torch:
            return _core.TensorView(self.name, DTYPES[tensor.dtype], self.region, tensor.data_ptr(), "other")
        return storage.engine_view(self.name, DTYPES[tensor.dtype], tensor, self.region)

    def _window(self) -> _core.Region:
        return _core.Region.whole(list(self.local.tensor.shape)).window(self.begin, self.begin + self.region.size)

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole if self.region.size == whole.numel() else whole[self.begin : self.begin + self.region.size]


def divide(local: LocalTensor, replicas: str) -> tuple[_core.Region, int]:
    """Returns (region, begin): the part of ``local`` that this rank averages. Nested replica groups divide what the one
    before left."""
    if replicas != "split" or not local.replicas:
        return local.region, 0
    return _core.owned(local.region, [(index, count) for _, index, count in local.replicas])


Give = Callable[[list[Tracked], Options], None]


def track(
    locals_: Iterable[LocalTensor], options: Options, source: Mapping[str, Source] | None, give: Give | None
) -> list[Tracked]:
    """Returns all tracked tensors, with memory for the averages; ``give()`` gives that where it is not None. Copies
    nothing yet."""
    locals_ = list(locals_)
    source = {} if source is None else instance("source", source, Mapping)
    if unknown := set(source) - {local.name for local in locals_}:
        raise invalid(f"source= names tensors that are not averaged: {', '.join(sorted(map(str, unknown)))}")
    tracked = [_tracked(local, options.replicas, source.get(local.name)) for local in locals_]
    if give is not None:
        give(tracked, options)
    else:
        homes = [_home(row, options) for row in tracked]
        for device in dict.fromkeys(homes):
            rows = [row for row, home in zip(tracked, homes, strict=True) if home == device]
            averages = arena([row.region for row in rows], options.dtype, len(options.schedules), device)
            for row, own in zip(rows, averages, strict=True):
                row.averages = own
    _leave_to_torch(tracked, options)
    return tracked


def _leave_to_torch(tracked: Sequence[Tracked], options: Options) -> None:
    """Marks averages for which the engine has no kernels, and warns of them once for each device."""
    for row in tracked:
        device = storage.device_of(row.averages[0])
        refusal = storage.why_not(device)
        row.by_torch = bool(refusal) or options.to_nearest
        if refusal and options.dtype.itemsize == 2 and not options.to_nearest:
            raise unsupported(f"'{row.name}' on {device}: 16-bit averages take stochastic=False there, since {refusal}")
        if refusal and device not in _warned:
            _warned.add(device)
            warn(f"averages on {device} are updated by PyTorch's own operations: {refusal}")


_warned = set[torch.device]()


def facts_of(tracked: Sequence[Tracked]) -> dict[str, Any]:
    """Returns the facts that must be equal on all ranks."""
    tensors = {row.name: f"{row.local.region.shape} {row.source.dtype}" for row in tracked}
    return {
        "tensors": tensors,
        "order": list(tensors),
        "averages on the host of weights on a device": any(row.is_offloaded or row.is_copied for row in tracked),
        "stretches in source=": [row.name for row in tracked if row.stretched],
    }


def _home(row: Tracked, options: Options) -> torch.device:
    """Returns where the averages of ``row`` live: with its weights, or on the host."""
    home, wanted = storage.device_of(row.source), options.device
    if wanted is None or wanted == home or (wanted.type == home.type and wanted.index is None):
        return home
    if wanted.type == "cpu":
        row.is_offloaded = home.type == "cuda" and _core.cuda_available() and not options.to_nearest
        row.is_copied = not row.is_offloaded
        row.follow()
        return torch.device("cpu")
    raise unsupported(
        f"device={str(wanted)!r}: '{row.name}' is on {home}, and averages live with their weights (leave device= out) "
        "or on the host (device='cpu')"
    )


def _tracked(local: LocalTensor, replicas: str, source: Source | None) -> Tracked:
    """Returns the tracked tensor of ``local``, without averages. ``source``: its value in `source=`."""
    refuse_unaverageable(local)
    if source is None:
        _refuse_dtype(local.name, local.tensor.dtype)
        return Tracked(local, *divide(local, replicas))
    if not isinstance(source, tuple):
        master = _source(local, source, local.region.size, "of this rank's part")
        return Tracked(local, *divide(local, replicas), master)
    if replicas == "copy" and local.replicas:
        raise invalid(f"source= of '{local.name}' is a stretch, which no other rank has; it takes replicas='split'")
    region, begin = _placed(local, *source)
    return Tracked(local, region, begin, _source(local, source[0], region.size, "elements from its first"), True)


def follow_source(row: Tracked, source: Source | None, replicas: str) -> None:
    """Takes the memory that `source=` names now for the same elements."""
    new_row = _tracked(row.local, replicas, source)
    if not new_row.mastered or new_row.region != row.region or new_row.source.dtype != row.source.dtype:
        raise invalid(f"source= of '{row.name}' was {row.region} in {row.source.dtype}, and is no more; make a new EMA")
    row._master = new_row.source


def _source(local: LocalTensor, source: torch.Tensor, size: int, of: str) -> torch.Tensor:
    tensor = getattr(source, "_local_tensor", source).detach()  # a DTensor's memory on this rank
    if tensor.numel() != size or not tensor.is_contiguous() or tensor.device != local.tensor.device:
        raise invalid(
            f"source= of '{local.name}' has {tensor.numel()} elements on {tensor.device}; "
            f"it must be contiguous, with the {size} {of}, on {local.tensor.device}"
        )
    _refuse_dtype(local.name, tensor.dtype)
    return tensor.view(-1)


def _refuse_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        only = f"only {', '.join(map(str, DTYPES))} are averaged"
        raise invalid(f"'{name}' is {dtype}; {only}. Leave it out with params=")


_AT_ONCE = 8  # weights that an update checks, whose time must not grow with the frozen ones


class RequiresGradWatch:
    """Watches weights that were frozen when the averages were made, and have none: warns, once, when some of them are
    trained."""

    def __init__(self, frozen: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._frozen = list(frozen)
        self._next = itertools.cycle(self._frozen)

    def refresh(self, everywhere: bool = False) -> None:
        """Checks the next few weights, or all with ``everywhere``."""
        checked = self._frozen if everywhere else itertools.islice(self._next, _AT_ONCE)
        if not self._frozen or not any(p.requires_grad for _, p in checked):
            return
        names, self._frozen = [name for name, p in self._frozen if p.requires_grad], []
        warn(
            f"{first_of(names)}: frozen when this EMA was made, trained now, and not averaged: exports and "
            "swapped() have the weights as they are. To average them, make a new EMA and load the old one's state into "
            "it: new.load_state_dict(old.state_dict(), strict=False)"
        )


def common_weight(row: Tracked) -> Common | None:
    """Returns the averaged tensor for a comparison, where other ranks should have the same."""
    return common_of(row.local, row.source if row.mastered and not row.stretched else row.local.tensor)
