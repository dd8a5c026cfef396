"""What is merged: paths, the rule that gives them coefficients, and the inputs of the engine that they are when they are open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardow import _core
from shardow.base.checks import invalid
from shardow.files import engine, paths
from shardow.files.paths import StrPath
from shardow.merging import foreign
from shardow.ranks.gather import Part
from shardow.ranks.team import Team

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
        self, inputs: Sequence[StrPath], *, weights: Sequence[float] | None = None, normalize: bool = False, ema: float | None = None,
        per_step: bool = False, lawa: int | None = None, curve: str | None = None, steps: Sequence[int] | None = None,
        key: str | None = None,
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
        self._weights, self._normalize, self._ema, self._per_step = weights, normalize, ema, per_step
        self._lawa, self._curve, self._steps, self._key = lawa, curve, steps, key

    def __repr__(self) -> str:
        return f"Merged({self.inputs})"

    def open(self, what: str, team: Team) -> Opened:
        """Collective."""
        team.same(what, {"inputs": self.inputs, "rule": repr([value for name, value in sorted(vars(self).items()) if name != "inputs"])})
        found = [self._open(what, path, team) for path in self.inputs]
        steps: Sequence[int | None] = self._steps or [
            _core.step_of(path, one.metadata) for path, (_, one) in zip(self.inputs, found, strict=True)
        ]
        inputs = [_core.MergeInput(path, source, 0.0, step) for path, (source, _), step in zip(self.inputs, found, steps, strict=True)]

        def weigh() -> tuple[list[_core.MergeInput], _core.Coefficients]:
            ordered = inputs if self._weights is not None else _core.sorted_by_step(inputs)
            coefficients = self._coefficients(ordered)
            for one, coefficient in zip(ordered, coefficients.values, strict=True):
                one.coefficient = coefficient
            return ordered, coefficients

        ordered, coefficients = team.agree(what, weigh)
        last = _core.sorted_by_step(inputs)[-1].name
        return Opened(ordered, coefficients, found[self.inputs.index(last)][1])

    def _open(self, what: str, path: str, team: Team) -> tuple[Any, Newest]:
        if team.agree(what, lambda: foreign.is_foreign(Path(path))):
            source = team.agree(what, lambda: foreign.whole_tensors(Path(path), self._key))
            return source, Newest(source.tensors, {})
        opened = engine.opened(path, team)
        return opened, Newest(opened.tensors, opened.metadata)

    def _coefficients(self, inputs: list[_core.MergeInput]) -> _core.Coefficients:
        make = _core.Coefficients
        if self._weights is not None:
            return make.given([float(one) for one in self._weights], self._normalize)
        if self._ema is not None:
            return make.ema_per_step(_core.steps_of(inputs), self._ema) if self._per_step else make.ema(len(inputs), self._ema)
        if self._lawa is not None:
            return make.lawa(len(inputs), self._lawa)
        return make.uniform(len(inputs)) if self._curve is None else make.curve(self._curve, _core.steps_of(inputs))

    def read(self, choose: Choose, team: Team, **options: Any) -> dict[str, Any]:
        """As engine.read_chosen(), of what the merge would hold. Collective."""
        opened = self.open("load()", team)
        parts, strict = team.agree("load()", lambda: choose(opened.newest))
        report = engine.read_merged(parts, opened.inputs, team, strict=strict, **options)
        return {**report, "metadata": {**opened.newest.metadata, **report["metadata"]}}
