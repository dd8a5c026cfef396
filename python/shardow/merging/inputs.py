"""What is merged: paths, the rule that gives them coefficients, and the inputs of the engine that they are when they
are open.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardow import _core
from shardow.base.checks import invalid, whole
from shardow.files import engine, paths
from shardow.files.paths import StrPath
from shardow.merging import foreign
from shardow.ranks.gather import Part
from shardow.ranks.team import Team

_MOST_STEPS = 2**53  # beyond, float64 has no longer every whole number

Choose = Callable[["Newest"], tuple[Sequence[Part], bool]]


@dataclass(frozen=True)
class Opened:
    """In the order of their coefficients."""

    inputs: list[_core.MergeInput]
    coefficients: _core.Coefficients
    newest: Newest


@dataclass(frozen=True)
class Newest:
    """What the input of the latest step holds, as a file tells it: {name: (dtype, shape)}."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    metadata: dict[str, str]


class Merged:
    """Checkpoints and how they are weighed, for ``load()``; made by ``merged()``."""

    def __init__(
        self, inputs: Sequence[StrPath], *, weights: Sequence[float] | None = None, normalize: bool = False,
        ema: float | None = None, per_step: bool = False, lawa: int | None = None, curve: str | None = None,
        steps: Sequence[int] | None = None, key: str | None = None,
    ) -> None:  # fmt: skip
        if isinstance(inputs, (str, bytes)) or not isinstance(inputs, Sequence):
            raise invalid(f"inputs={inputs!r}; give a list of paths")
        self.inputs = [paths.to_read(one) for one in inputs]
        rules = {"weights": weights, "ema": ema, "lawa": lawa, "curve": curve}
        if len(given := [name for name, value in rules.items() if value is not None]) > 1:
            raise invalid(f"{' and '.join(f'{name}=' for name in given)}: one rule gives the coefficients")
        if per_step and ema is None:
            raise invalid("per_step=True goes with ema=")
        if normalize and weights is None:
            raise invalid("normalize=True goes with weights=")
        for name, values in (("weights", weights), ("steps", steps)):
            if values is not None and len(values) != len(self.inputs):
                raise invalid(f"{name}= has {len(values)} numbers for {len(self.inputs)} inputs")
        self._rule: dict[str, Any] = {
            "weights": None if weights is None else [_number("weights", one) for one in weights],
            "normalize": bool(normalize),
            "ema": None if ema is None else _number("ema", ema),
            "per_step": bool(per_step),
            "lawa": None if lawa is None else whole("lawa", lawa, 1),
            "curve": curve if curve is None else str(curve),
        }
        self._steps, self._key = None if steps is None else [_step(one) for one in steps], key

    def __repr__(self) -> str:
        return f"Merged({self.inputs})"

    def open(self, what: str, team: Team) -> Opened:
        """Collective."""
        team.same(what, {"inputs": self.inputs, "rule": repr([self._rule, self._steps, self._key])})
        found = [self._open(what, path, team) for path in self.inputs]
        steps: Sequence[int | None] = self._steps or [
            _core.step_of(path, one.metadata) for path, (_, one) in zip(self.inputs, found, strict=True)
        ]
        inputs = [
            _core.MergeInput(path, source, 0.0, step)
            for path, (source, _), step in zip(self.inputs, found, steps, strict=True)
        ]
        ordered, coefficients, newest = team.agree(what, lambda: _core.weigh(inputs, **self._rule))
        return Opened(ordered, coefficients, found[self.inputs.index(newest)][1])

    def _open(self, what: str, path: str, team: Team) -> tuple[Any, Newest]:
        if team.agree(what, lambda: foreign.is_foreign(Path(path))):
            source = team.agree(what, lambda: foreign.parts_of(Path(path), self._key))
            return source, Newest(source.tensors, {})
        opened = engine.opened(path, team)
        return opened, Newest(opened.tensors, opened.metadata)

    def read(self, choose: Choose, team: Team, **options: Any) -> dict[str, Any]:
        """As engine.read_chosen(), of what the merge would hold. Collective."""
        opened = self.open("load()", team)
        parts, strict = team.agree("load()", lambda: choose(opened.newest))
        report = engine.read_merged(parts, opened.inputs, team, strict=strict, **options)
        return {**report, "metadata": {**opened.newest.metadata, **report["metadata"]}}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise invalid(f"{name}= has {value!r}; it must be a number") from None


def _step(value: Any) -> int:
    try:
        step = operator.index(value)
    except TypeError:
        step = -1
    if not 0 <= step <= _MOST_STEPS:
        raise invalid(f"steps= has {value!r}; a step is a whole number from 0 to 2^53")
    return step
