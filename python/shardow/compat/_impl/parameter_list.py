"""ParameterList: averages of a list of parameters, as a list of tensors, for compat classes that know no names."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardow.base.checks import invalid
from shardow.compat._impl.given_memory import AveragedTensor, GivenMemory, copy_all, warn_of_rounding
from shardow.sharding.fsdp_ownership import resharded
from shardow.sharding.parameter_registry import state_for
from shardow.sharding.storage import MARKS

_requires_grad = operator.attrgetter("requires_grad")
_OTHERS = "the state is another model's, or its parameters were in another order when it was saved"


class ParameterList:
    """Averages ``shadows`` of parameters, list beside list, by ``rule``. A shadow is like its parameter: plain, or
    sharded as it is (DTensor; FSDP1's local views). ``copy_frozen``: parameters that want no gradient now are copied
    instead.

    Both lists come with every update, since their owners may replace them: the same memory costs less than a
    microsecond a tensor, other memory is paired anew. Parameters are neither kept alive nor weakly referenced: FSDP2
    wants torch to swap them, and torch swaps no weakly referenced tensor.
    """

    def __init__(self, rule: str, copy_frozen: bool = False) -> None:
        self._rule, self._copy_frozen = rule, copy_frozen
        self._memory: GivenMemory | None = None
        self._marks: object = None  # of the paired lists
        self._sharded = self._warned = False

    @torch.no_grad()
    def update(
        self, shadows: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], decay: float, weight: float
    ) -> None:
        """Makes one update. Raises ValueError and RuntimeError, before anything changes, where a shadow and its
        parameter differ in shape."""
        if self._marks_of(shadows, parameters) != self._marks:
            parameters = resharded(parameters)
            if self._marks_of(shadows, parameters) != self._marks:
                self._bind(shadows, parameters)
        assert self._memory is not None
        self._memory.sources = list(parameters)
        try:
            self._memory.update(decay, weight)
        finally:
            self._memory.sources = []

    def _bind(self, shadows: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        self._marks = None  # a failure leaves nothing paired
        check(shadows, parameters)
        rows = [
            AveragedTensor(
                f"parameter {i}", p, e, fate="average" if p.requires_grad or not self._copy_frozen else "copy"
            )
            for i, (e, p) in enumerate(zip(shadows, parameters, strict=True))
        ]
        if not self._warned:
            self._warned = True
            averages = [row.average for row in rows if row.fate == "average"]
            warn_of_rounding(averages, "Keep them in float32: to(dtype=torch.float32)")
        self._memory = GivenMemory(rows, self._rule)
        self._sharded = any(map(_is_sharded, parameters))
        self._marks = self._marks_of(shadows, parameters)

    def _marks_of(self, shadows: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> tuple[object, ...]:
        """Returns what an update compares."""
        lists = (_locals(shadows), _locals(parameters)) if self._sharded else (shadows, parameters)
        trained = list(map(_requires_grad, parameters)) if self._copy_frozen else []
        return *map(MARKS.of, lists), trained

    def __getstate__(self) -> dict[str, Any]:
        """Returns the options alone: copies pair their lists anew."""
        kept = {name: getattr(self, name) for name in ("_rule", "_copy_frozen", "_warned")}
        return {**kept, "_memory": None, "_marks": None, "_sharded": False}


def copies(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns shadows, equal to their parameters."""
    return [parameter.detach().clone() for parameter in resharded(parameters)]


def assign(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Writes the values into the parameters ``targets``, cast and moved; a backward through the old ones raises. Raises
    as check()."""
    targets = resharded(targets)
    check(values, targets)
    with torch.no_grad():
        copy_all(_locals(targets), _locals(values))
    torch.autograd.graph.increment_version([target for target in targets if _is_sharded(target)])


def loaded(
    what: str, values: Any, templates: Sequence[torch.Tensor], error: type[Exception] | None = None
) -> list[torch.Tensor]:
    """Returns copies of a state's tensors; of whole tensors, this rank's part where its template is sharded. Raises
    ValueError, an ``error`` too, where ``values`` are no list of tensors, and as check()."""
    if not isinstance(values, list) or not all(isinstance(value, torch.Tensor) for value in values):
        raise invalid(f"{what} must be a list of tensors", error)
    if len(values) == len(templates):
        values = [state_for(template, {"": value})[""] for value, template in zip(values, templates, strict=True)]
    check(values, templates, loading=True)
    return [value.detach().clone() for value in values]


def moved(
    tensors: Sequence[torch.Tensor], device: torch.device | str | None, dtype: torch.dtype | None,
    non_blocking: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """Moves tensors to the device, and floating ones to the dtype."""
    return [
        t.to(device=device, dtype=dtype if t.is_floating_point() else None, non_blocking=non_blocking) for t in tensors
    ]


def check(shadows: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], loading: bool = False) -> None:
    """Raises an error that is a ValueError and a RuntimeError where lengths or shapes differ. ``loading``: the shadows
    are a state's."""
    if len(shadows) != len(parameters):
        differ = f"{len(parameters)} parameters were given; the averages were made of {len(shadows)}"
        if loading:
            differ = (
                f"the state has {len(shadows)} averages; the averages were made of {len(parameters)} here: it is "
                "another model's"
            )
        raise invalid(differ, RuntimeError)
    for i, (shadow, parameter) in enumerate(zip(shadows, parameters, strict=True)):
        if shadow.shape == parameter.shape and _is_sharded(parameter) != _is_sharded(shadow):
            whole, shards = ("average", "parameter") if _is_sharded(parameter) else ("parameter", "average")
            way_out = (
                "make the averages of these parameters, then load into them (diffusers: from_pretrained(..., "
                "parameters=))"
            )
            raise invalid(f"{whole} {i} is whole, its {shards} is sharded; {way_out}", RuntimeError)
        if shadow.shape != parameter.shape or _shape(shadow) != _shape(parameter):
            why = _OTHERS if loading else "pass the parameters in the order of construction"
            differ = f"parameter {i} has shape {tuple(_shape(parameter))}, its average {tuple(_shape(shadow))}; {why}"
            raise invalid(differ, RuntimeError)


def _locals(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [getattr(t, "_local_tensor", t) for t in tensors]


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def _shape(tensor: torch.Tensor) -> tuple[object, ...]:
    """Returns the global shape, and where the tensor is sharded the local one."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor.shape if local is None else (tuple(tensor.shape), tuple(local.shape))
