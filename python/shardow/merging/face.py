"""merge() and merged(): checkpoints averaged after the fact, into files or into a model; what is merged, the rule that
gives it coefficients, and the inputs of the engine that it is when it is open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardow import _core
from shardow.base.checks import invalid, number, seconds, several, whole
from shardow.base.progress import Progress
from shardow.distributed.rank_group import Comparison, RankGroup, equal_facts, naming
from shardow.files import engine, paths
from shardow.files.background import settle
from shardow.files.paths import StrPath
from shardow.merging import foreign

T = TypeVar("T")
_MOST_STEPS = 2**53  # beyond, float64 has no longer every whole number


def merged(
    inputs: Sequence[StrPath], *, weights: Sequence[float] | None = None, normalize: bool = False,
    ema: float | None = None, per_step: bool = False, lawa: int | None = None, curve: str | None = None,
    steps: Sequence[int] | None = None, key: str | None = None,
) -> Merged:  # fmt: skip
    """The sum of c_j x_j over checkpoints, in place of a path: ``shardow.load(model, shardow.merged([...]))``. Reads
    nothing yet.

    Each rank reads its own bytes of every input, and holds a few chunks of them beside its shard.

    Args:
        inputs: .safetensors files, Hugging Face directories, directories of torch.distributed.checkpoint, and files of
            torch.save(), which are read with weights_only. By default c_j is 1 over their number.
        weights: c_j, in the order of the inputs; their sum need not be 1. ``normalize`` divides by it.
        ema: e_j = d e_{j-1} + (1 - d) x_j over the inputs in the order of their steps; with ``per_step``, d to the
            power of the steps between them.
        lawa: the mean of the last so many, by step.
        curve: "linear", "cosine", "inv-sqrt" or "1-sqrt": x_0 + sum of f_j (x_j - x_{j-1}), where f_j is the curve's
            mean from one step to the next: what a decay of the learning rate would have given.
        steps: of the inputs, or tokens; by default what their metadata or their names say.
        key: under which the weights are in inputs that hold more, of torch's own formats: "model".

    Raises:
        ValueError: rules that exclude each other, lists of another length.
    """
    if isinstance(inputs, (str, bytes)) or not isinstance(inputs, Sequence):
        raise invalid(f"inputs={inputs!r}; give a list of paths")
    read = [paths.to_read(path) for path in inputs]
    rules = {"weights": weights, "ema": ema, "lawa": lawa, "curve": curve}
    if len(given := [name for name, value in rules.items() if value is not None]) > 1:
        raise invalid(f"{' and '.join(f'{name}=' for name in given)}: one rule gives the coefficients")
    if per_step and ema is None:
        raise invalid("per_step=True goes with ema=")
    if normalize and weights is None:
        raise invalid("normalize=True goes with weights=")
    rule: dict[str, Any] = {
        "weights": _each("weights", weights, read, number),
        "normalize": bool(normalize),
        "ema": None if ema is None else number("ema", ema),
        "per_step": bool(per_step),
        "lawa": None if lawa is None else whole("lawa", lawa, 1),
        "curve": curve if curve is None else str(curve),
    }
    return Merged(read, rule, _each("steps", steps, read, lambda name, step: whole(name, step, 0, _MOST_STEPS)), key)


def _each(name: str, numbers: Any, inputs: list[str], checked: Callable[[str, Any], T]) -> list[T] | None:
    """Returns numbers, of which there must be one for each input."""
    if numbers is None:
        return None
    values = several(name, numbers)
    if len(values) != len(inputs):
        raise invalid(f"{name}= has {len(values)} numbers for {len(inputs)} inputs")
    return [checked(name, value) for value in values]


def merge(
    inputs: Sequence[StrPath], out: StrPath, *, weights: Sequence[float] | None = None, normalize: bool = False,
    ema: float | None = None, per_step: bool = False, lawa: int | None = None, curve: str | None = None,
    steps: Sequence[int] | None = None, key: str | None = None, dtype: torch.dtype | str | None = None,
    max_shard_size: int | str | None = None, metadata: Mapping[str, str] | None = None, verify: bool = True,
    group: dist.ProcessGroup | None = None, progress: Progress | None = None, timeout: float | timedelta | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Writes what merged() describes, as save() would: the old checkpoint or the new one, whole, at every instant.

    In one process, or collective over its ranks, which each write their own bytes; the bytes are the same, whatever the
    order of the inputs and the number of ranks. Sums are made in float64 and rounded once. Integer and boolean tensors
    are those of the newest input. Inputs are read once, and memory is a few chunks.

    Args:
        inputs, weights, normalize, ema, per_step, lawa, curve, steps, key: as merged().
        out: a .safetensors file, or a directory in the Hugging Face layout.
        dtype: of floating tensors; by default their own, which must be the same in all inputs then.
        max_shard_size, metadata, progress, timeout: as save().
        verify: compare the inputs' checksums where they carry them, before anything is published; no extra reads.
        group: the ranks that merge; by default all, where torch.distributed is initialised.

    Returns:
        dict: {"inputs": [{"name", "step", "coefficient"}] in the order in which they were added, "newest": name of the
        input that integers and booleans are taken from, "formula": str, "sum": of the coefficients, "index_error":
        None, or how far the learning rate would be from the curve's at most, in parts of its peak, were inputs weighed
        by index, "averaged": [name], "taken": [name of a tensor that is the newest input's], "files": [path],
        "bytes_read", "bytes_written": by this rank, "seconds": float}.

    Raises:
        ValueError: all that does not fit, in one message: names, shapes, dtypes, steps that are not known; an input's
            bytes are not what was saved; or sums are beyond the largest number of the output's dtype.
            NotImplementedError: element types below 16 bits. OSError, TimeoutError. Nothing is published then.
    """
    what = merged(
        inputs, weights=weights, normalize=normalize, ema=ema, per_step=per_step, lawa=lawa, curve=curve, steps=steps,
        key=key,
    )  # fmt: skip
    everybody = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    ranks = RankGroup(everybody if group is None else group, seconds(timeout))
    options: dict[str, Any] = {"verify": bool(verify)}

    def check() -> None:
        texts = engine.texts(metadata)
        if _core.MERGE_KEY in texts:
            raise invalid(f"metadata: {_core.MERGE_KEY} is where a merge says what it was made of")
        options.update(engine.dtype_and_limit(dtype, max_shard_size), metadata=texts, target=paths.to_write(out))

    opened = Opened(what, "merge()", ranks, check)
    report = engine.write_merged(opened.inputs, ranks, formula=opened.formula, progress=progress, **options)
    return {**report, "formula": opened.formula, "index_error": opened.index_error}


class Merged:
    """Checkpoints and how they are weighed, for ``load()``; made by ``merged()``."""

    def __init__(self, inputs: list[str], rule: dict[str, Any], steps: list[int] | None, key: str | None) -> None:
        """``rule``: what the engine's weigh() takes; see merged()."""
        self.inputs, self.rule, self.steps, self.key = inputs, rule, steps, key

    def __repr__(self) -> str:
        return f"Merged({self.inputs})"


class Opened:
    """The inputs of a merge, opened by all ranks. ``tensors`` and ``metadata`` are those of the input of the latest
    step, as a file tells them: {name: (dtype, shape)}. ``inputs``: all of the merge, in the order of the rule, whose
    ``formula`` gave them coefficients; ``index_error``: see merge()."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    metadata: dict[str, str]
    inputs: list[_core.MergeInput]
    formula: str
    index_error: float | None

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
        self.inputs, self.formula, self.index_error, newest = _core.weigh(inputs, **merged.rule)
        last = merged.inputs.index(newest)
        self.tensors, self.metadata = sources[last].tensors, texts[last]
        self._then(self)
