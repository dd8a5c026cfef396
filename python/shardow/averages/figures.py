"""What averages tell of themselves, and what they have met."""

from __future__ import annotations

from collections.abc import Sequence

from shardow import _core
from shardow.averages import state as _state
from shardow.base.checks import invalid


def stats(engine: _core.Average, overlap: bool, offloaded: bool) -> dict[str, float]:
    """See EMA.stats()."""
    found: dict[str, float] = dict(engine.stats())
    link, hidden, waited = (found.pop(name) for name in ("offload_bytes", "hidden_seconds", "waited_seconds"))
    decays = engine.decays
    return {
        **found,
        **({"offload/bytes": link} if offloaded else {}),
        **({"kernels/compile_seconds": compiled} if (compiled := _core.cuda_compiler()[2]) else {}),
        **({"offload/hidden_seconds": hidden, "offload/waited_seconds": waited} if overlap or offloaded else {}),
        **{"decay" if len(decays) == 1 else f"decay/{k}": decay for k, decay in enumerate(decays)},
    }


def text(engine: _core.Average, keys: Sequence[str], ranks: int) -> str:
    """Of repr()."""
    found = engine.stats()
    compiler, device, seconds = _core.cuda_compiler()
    kernels = f", kernels for {device} compiled by {compiler} in {seconds:.1f} s" if compiler else ""
    return (
        f"EMA(decay=[{', '.join(keys)}], {_state.options_in(engine.state())}, {found['parameters']} tensors, "
        f"{found['elements']:,} elements on this rank of {ranks}, {found['bytes']:,} bytes, "
        f"step {found['step']}{kernels})"
    )


def of_non_finite(held: int, nonfinite: str) -> str:
    """A warning."""
    fate = "become so too" if nonfinite == "propagate" else "keep their last values"
    raised = ", and the next collective call raises on every rank" if nonfinite == "raise" else ""
    return (
        f"{held} weights on this rank are NaN or Inf; their averages {fate}{raised} (nonfinite={nonfinite!r}). "
        "stats()['held_nonfinite'] counts them; this warning is given once"
    )


def raise_non_finite(engine: _core.Average, rank: int) -> None:
    """nonfinite="raise" with several ranks: one that raised alone, in update(), would leave the others waiting."""
    met = engine.non_finite()
    if met is not None:
        engine.forget_non_finite()
        step, elements, name = met
        where = f"at step {step}, {elements} weights on rank {rank}"
        raise invalid(f"{where} were NaN or Inf, first in '{name}' (nonfinite='raise'); their averages were held")
