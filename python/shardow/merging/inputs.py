"""What is merged: paths, the rule that gives them coefficients, and the inputs of the engine that they are when they
are open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardow import _core
from shardow.distributed.rank_group import Comparison, RankGroup, equal_facts, naming
from shardow.files import engine
from shardow.files.background import settle
from shardow.merging import foreign


class Merged:
    """Checkpoints and how they are weighed, for ``load()``; made by ``merged()``."""

    def __init__(self, inputs: list[str], rule: dict[str, Any], steps: list[int] | None, key: str | None) -> None:
        """``rule``: what the engine's weigh() takes; see merged()."""
        self.inputs, self.rule, self.steps, self.key = inputs, rule, steps, key

    def __repr__(self) -> str:
        return f"Merged({self.inputs})"


class Opened:
    """The inputs of a merge, opened by all ranks. ``tensors`` and ``metadata`` are those of the input of the latest
    step, as a file tells them: {name: (dtype, shape)}. ``inputs``: all of the merge, in the order of their
    ``coefficients``."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    metadata: dict[str, str]
    inputs: list[_core.MergeInput]
    coefficients: _core.Coefficients

    def __init__(
        self, merged: Merged, what: str, ranks: RankGroup, check: Callable[[], object] = lambda: None,
        then: Callable[[Opened], object] = lambda _: None,
    ) -> None:  # fmt: skip
        """``check()`` of what else a call was given comes first, ``then()`` when all is open, again where files were
        replaced meanwhile; both may raise on one rank for all. Collective."""
        self._merged, self._what, self._ranks, self._check, self._then = merged, what, ranks, check, then
        settle(ranks.process_group)
        with engine.several_said(*merged.inputs), naming(what):
            ranks.verb(what, lambda: _core.open_checkpoints(ranks.group, self, ranks.timeout))

    def read(self, view: _core.TensorView) -> None:
        """Fills a view from the merged tensor of its name. Not collective."""
        _core.load_merged(_core.solo(), [view], self.inputs, strict=False)

    # ---- what the engine calls

    def look(self) -> list[Comparison]:
        self._check()
        merged = self._merged
        self._by_torch = [foreign.is_foreign(Path(path)) for path in merged.inputs]
        facts = {"inputs": merged.inputs, "which of them torch wrote": self._by_torch}
        facts |= {"rule": [merged.rule, merged.steps, merged.key]}
        return [equal_facts(self._what, facts, self._ranks)]

    def find(self) -> list[str]:
        """Returns the paths that the engine opens."""
        return [path for path, by_torch in zip(self._merged.inputs, self._by_torch, strict=True) if not by_torch]

    def opened(self, files: list[_core.Checkpoint]) -> None:
        merged, checkpoints = self._merged, iter(files)
        sources = [
            foreign.parts_of(Path(path), merged.key) if by_torch else next(checkpoints)
            for path, by_torch in zip(merged.inputs, self._by_torch, strict=True)
        ]
        texts = [source.metadata if isinstance(source, _core.Checkpoint) else {} for source in sources]
        steps: Sequence[int | None] = merged.steps or [
            _core.step_of(path, text) for path, text in zip(merged.inputs, texts, strict=True)
        ]
        inputs = [
            _core.MergeInput(path, source, 0.0, step)
            for path, source, step in zip(merged.inputs, sources, steps, strict=True)
        ]
        self.inputs, self.coefficients, newest = _core.weigh(inputs, **merged.rule)
        last = merged.inputs.index(newest)
        self.tensors, self.metadata = sources[last].tensors, texts[last]
        self._then(self)
