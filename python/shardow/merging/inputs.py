"""What is merged: paths, the rule that gives them coefficients, and the inputs of the engine that they are when they
are open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardow import _core
from shardow.files import engine
from shardow.merging import foreign
from shardow.ranks.gather import Part
from shardow.ranks.team import Team

Choose = Callable[["Newest"], tuple[Sequence[Part], bool]]


@dataclass(frozen=True)
class Newest:
    """What the input of the latest step holds, as a file tells it: {name: (dtype, shape)}. ``inputs``: all of the
    merge, in the order of their coefficients."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    metadata: dict[str, str]
    inputs: list[_core.MergeInput] = field(default_factory=list)

    def read(self, view: _core.TensorView) -> None:
        """Fills a view from the merged tensor of its name. Not collective."""
        _core.load_merged(_core.solo(), [view], self.inputs, strict=False)


class Merged:
    """Checkpoints and how they are weighed, for ``load()``; made by ``merged()``."""

    def __init__(self, inputs: list[str], rule: dict[str, Any], steps: list[int] | None, key: str | None) -> None:
        """``rule``: what the engine's weigh() takes; see merged()."""
        self.inputs, self._rule, self._steps, self._key = inputs, rule, steps, key

    def __repr__(self) -> str:
        return f"Merged({self.inputs})"

    def open(
        self, what: str, team: Team, check: Callable[[], object] = lambda: None
    ) -> tuple[Newest, _core.Coefficients]:
        """``check()``: of what else a call was given; may raise. Collective."""
        ways = [False] * len(self.inputs)

        def asked() -> dict[str, Any]:
            check()
            ways[:] = map(foreign.is_foreign, map(Path, self.inputs))
            facts = {"inputs": self.inputs, "rule": repr([self._rule, self._steps, self._key])}
            return {**facts, "which of them torch wrote": ways}

        team.same(what, asked)
        found = [self._open(what, path, team, is_foreign) for path, is_foreign in zip(self.inputs, ways, strict=True)]
        steps: Sequence[int | None] = self._steps or [
            _core.step_of(path, one.metadata) for path, (_, one) in zip(self.inputs, found, strict=True)
        ]
        inputs = [
            _core.MergeInput(path, source, 0.0, step)
            for path, (source, _), step in zip(self.inputs, found, steps, strict=True)
        ]
        ordered, coefficients, newest = team.agree(what, lambda: _core.weigh(inputs, **self._rule))
        return replace(found[self.inputs.index(newest)][1], inputs=ordered), coefficients

    def _open(self, what: str, path: str, team: Team, is_foreign: bool) -> tuple[Any, Newest]:
        if is_foreign:
            source = team.agree(what, lambda: foreign.parts_of(Path(path), self._key))
            return source, Newest(source.tensors, {})
        opened = engine.opened(path, team)
        return opened, Newest(opened.tensors, opened.metadata)

    def read(self, choose: Choose, team: Team, **options: Any) -> dict[str, Any]:
        """As a load of one file, of what the merge would hold. Collective."""
        newest, _ = self.open("load()", team)
        parts, strict = team.agree("load()", lambda: choose(newest))
        report = engine.read_merged(parts, newest.inputs, team, strict=strict, **options)
        return {**report, "metadata": {**newest.metadata, **report["metadata"]}}
