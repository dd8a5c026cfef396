"""Averages whose profile is chosen after training, from snapshots that EMA.snapshot() saved: docs/posthoc.md.

plan() says which snapshots, with which coefficients, and how near their sum comes; sweep() says how near for all
widths, before anything is computed; synthesize() makes the average, in one read of the snapshots. The first two need no
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardow import _core, schedules
from shardow._core import PosthocPlan as Plan
from shardow._core import PosthocTerm as Term
from shardow._core import Schedule, Sweep, SweepPoint
from shardow.base.checks import invalid, number, one_of, seconds, several, whole, with_torch
from shardow.base.progress import Progress, shown
from shardow.files import paths

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Formula = Literal["exact", "continuous"]


def plan(
    directory: paths.StrPath, sigma_rel: float | None = None, *, schedule: Schedule | float | None = None,
    step: int | None = None, formula: Formula = "exact",
) -> Plan:  # fmt: skip
    """Of the average that a run would have tracked up to ``step``: the nearest sum of snapshots, by least squares over
    their profiles, with coefficients that sum to 1. Reads headers alone.

    Args:
        sigma_rel: width of its power-function profile, as of schedules.power(); or
        schedule: any of shardow.schedules, or a decay.
        step: None: that of the last snapshot. Later ones are left out.
        formula: "exact": sums over the updates that the run made, whatever its schedules and steps; "continuous":
            EDM2's integrals, for comparisons with its code. The residual and the bounds that are told are those of the
            exact profiles, either way.

    Raises:
        FileNotFoundError: there are no snapshots. ValueError: a step that they do not reach, or a file that is damaged.
    """
    if (sigma_rel is None) == (schedule is None):
        raise invalid("which average: give sigma_rel=, or schedule= for one that is no power function")
    target = schedules.power(sigma_rel) if sigma_rel is not None else schedules.as_schedules(schedule)[0]  # type: ignore[arg-type]
    step = None if step is None else whole("step", step)
    continuous = one_of("formula", formula, ("exact", "continuous")) == "continuous"
    return _core.posthoc_plan(Path(paths.to_read(directory)), target, step, continuous)


def synthesize(
    directory: paths.StrPath, sigma_rel: float | None = None, *, out: paths.StrPath,
    schedule: Schedule | float | None = None, step: int | None = None, formula: Formula = "exact",
    dtype: torch.dtype | str | None = None, max_shard_size: int | str | None = None,
    group: dist.ProcessGroup | None = None, timeout: float | timedelta | None = None, progress: Progress | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Makes that average: ``out`` is a .safetensors file, or a directory in the Hugging Face layout, published as every
    save is. Reads each snapshot once, a few chunks at a time; sums in float64, rounded once. Collective where
    torch.distributed is initialised: each rank writes its own bytes.

    Args:
        sigma_rel, schedule, step, formula: as in plan().
        dtype: of the average; None: that in which the averages were tracked.
        max_shard_size: of a file in a directory, in bytes or like "5GB".
        group: the ranks that write; by default all.
        timeout: seconds or timedelta, the deadline of the call.
        progress: called on rank 0 with (bytes done, bytes in all).

    Raises:
        As plan() does; ValueError too where ``out`` would take the place of a snapshot's files.

    Returns:
        dict: {"plan": what was made, with its residual and bounds, "files": [path], "bytes_read", "bytes_written": by
        this rank, "seconds"}.
    """
    with with_torch("synthesize()"):
        import torch.distributed as dist

        from shardow.distributed.rank_group import RankGroup, naming
        from shardow.files import engine
        from shardow.files.background import settle

    world = dist.group.WORLD if dist.is_initialized() else None
    ranks = RankGroup(world if group is None else group, seconds(timeout))

    def check() -> tuple[Plan, str, dict[str, Any]]:
        found = plan(directory, sigma_rel, schedule=schedule, step=step, formula=formula)
        _core.posthoc_check_output(Path(paths.to_read(directory)), Path(paths.to_write(out)))
        return found, paths.to_write(out), engine.dtype_and_limit(dtype, max_shard_size)

    settle(ranks.process_group)  # a snapshot may be under way
    found, where, options = ranks.agree("synthesize()", check)
    bar = shown(progress, f"synthesize {Path(where).name}", ranks.rank)
    with naming(f"synthesize() to {where}"):
        options.update(timeout=ranks.timeout, progress=bar)
        report = _core.posthoc_synthesize(ranks.group, found, Path(where), **options)
    return {"plan": found, **report}


def sweep(
    directory: paths.StrPath, picture: paths.StrPath | None = None, *, step: int | None = None,
    sigma_rels: Sequence[float] = (),
) -> Sweep:  # fmt: skip
    """The error to expect of every width, before anything is computed: the residual of the profile, and the rounding of
    the snapshots.

    Args:
        picture: a path for a picture of it, whose suffix is its format. Needs matplotlib.
        step: as in plan().
        sigma_rels: widths in (0, 0.28]; by default 46 of them.
    """
    drawing = None if picture is None else Path(paths.to_write(picture))
    step = None if step is None else whole("step", step)
    widths = [number("sigma_rels", width) for width in several("sigma_rels", sigma_rels)]
    found: Any = _core.posthoc_sweep(Path(paths.to_read(directory)), step, widths)
    if drawing is not None:
        _draw(found, drawing)
    return found  # type: ignore[no-any-return]


def _draw(errors: Sweep, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes, widths = figure.subplots(), [point.sigma_rel for point in errors.points]
    axes.semilogy(widths, [point.residual for point in errors.points], "#2c6fbb", label="residual of the profile")
    axes.semilogy(widths, [point.rounding for point in errors.points], "#d9692b", ls="--", label="their rounding")
    for width in errors.tracked:
        axes.axvline(width, color="#5b6475", ls=":", label=f"tracked: {width:g}")
    axes.set(title=f"Expected error at step {errors.step}, {errors.snapshots} snapshots", xlabel="sigma_rel")
    axes.legend()
    figure.savefig(path)


__all__ = ["Plan", "Sweep", "SweepPoint", "Term", "plan", "sweep", "synthesize"]


def __dir__() -> list[str]:
    return __all__
