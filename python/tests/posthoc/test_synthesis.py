"""What is synthesised is as near to the average that was tracked as it says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import ranks
import snapshot_runs as runs
import torch

import shardow
from shardow import posthoc, schedules

T = 240
WIDTHS = (0.03, 0.07, 0.15, 0.22)


def tracked(step: int, schedule: shardow.Schedule, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    model, ema = runs.started(schedule, dtype=dtype)
    for n in range(1, step + 1):
        runs.put(model, n)
        ema.update()
    return torch.as_tensor(ema.state_dict()["averages"]["weight"]).double()


def promised(found: posthoc.Plan, out: torch.Tensor, stored: float) -> torch.Tensor:
    """Of each weight: its span in training, its largest average, what float32 or bfloat16 rounds off the output."""
    seen = torch.stack([runs.weights(n) for n in range(found.step + 1)])
    return (
        found.variation * (seen.amax(0) - seen.amin(0))
        + found.rounding * seen.abs().amax(0)
        + stored * out.abs()
        + 1e-12
    )


def weight_in(path: Path) -> torch.Tensor:
    with shardow.open(path) as opened:
        return torch.as_tensor(opened["weight"]).double()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Snapshots of float64, float32 and bfloat16."""
    directory = tmp_path_factory.mktemp("run")
    runs.run(directory / "double", runs.powers(0.05, 0.1))
    model, ema = runs.started(runs.powers(0.05, 0.1), dtype=torch.float32)
    for step in range(1, T + 1):
        runs.put(model, step)
        ema.update()
        ema.snapshot(directory / "single", 30)
        ema.snapshot(directory / "half", 30, dtype="bfloat16")
    return directory


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("kind", "stored", "own"), [("double", 0.0, 0.0), ("single", 2.0**-24, 4e-7), ("half", 2.0**-24, 4e-7)]
)
def test_the_promise_holds(run: Path, tmp_path: Path, width: float, kind: str, stored: float, own: float) -> None:
    """``own``: of the averages' arithmetic in float32, in parts of the largest weight."""
    report = posthoc.synthesize(run / kind, sigma_rel=width, out=tmp_path / "out.safetensors")
    out, found = weight_in(tmp_path / "out.safetensors"), report["plan"]
    off = (out - tracked(T, schedules.power(width))).abs()
    bound = promised(found, out, stored) + own * found.size * 4
    assert bool((off <= bound).all())
    assert float(off.max()) > 1e-3 * float(bound.max())  # and it is no idle promise


@pytest.mark.parametrize(
    "schedule", [schedules.half_life(30), schedules.warmup(0.97), schedules.mean()], ids=lambda one: one.key()
)
@pytest.mark.parametrize("step", [90, 133])
def test_the_promise_holds_for_any_schedule_at_any_step(
    run: Path, tmp_path: Path, schedule: shardow.Schedule, step: int
) -> None:
    report = posthoc.synthesize(run / "double", schedule=schedule, step=step, out=tmp_path / "out.safetensors")
    out = weight_in(tmp_path / "out.safetensors")
    assert bool(((out - tracked(step, schedule)).abs() <= promised(report["plan"], out, 0.0)).all())


def test_what_was_tracked_comes_out_as_it_was(run: Path, tmp_path: Path) -> None:
    posthoc.synthesize(run / "single", sigma_rel=0.1, step=180, out=tmp_path / "out.safetensors")
    saved = run / "single" / "snapshot-000000180" / "ema-power-sigma_rel=0.1.safetensors"
    assert torch.equal(weight_in(tmp_path / "out.safetensors"), weight_in(saved))


def test_the_output(run: Path, tmp_path: Path) -> None:
    posthoc.synthesize(run / "half", sigma_rel=0.08, out=tmp_path / "own")
    with shardow.open(tmp_path / "own") as opened:
        assert opened["weight"].dtype == torch.float32  # as tracked, whatever the snapshots are
        told = json.loads(opened.metadata["shardow.merge"])
    assert told["formula"].startswith("post-hoc power(sigma_rel=0.08) at step 240: residual ")
    assert sum(one["coefficient"] for one in told["inputs"]) == pytest.approx(1, abs=1e-12)
    posthoc.synthesize(run / "half", sigma_rel=0.08, out=tmp_path / "half.safetensors", dtype="bfloat16")
    with shardow.open(tmp_path / "half.safetensors") as opened:
        assert opened["weight"].dtype == torch.bfloat16
    model = runs.Walk()
    shardow.load(model, tmp_path / "own")
    assert torch.equal(model.weight.detach(), weight_in(tmp_path / "own" / "model.safetensors"))


def _synthesised(directory: str, out: str) -> dict[str, Any]:
    report = posthoc.synthesize(directory, sigma_rel=0.12, out=out)
    return {"written": report["bytes_written"], "plan": [one.coefficient for one in report["plan"].terms]}


def test_every_rank_writes_its_own_bytes_of_the_same(run: Path, tmp_path: Path) -> None:
    posthoc.synthesize(run / "single", sigma_rel=0.12, out=tmp_path / "1.safetensors")
    told = ranks.run(3, _synthesised, str(run / "single"), str(tmp_path / "3.safetensors"))
    assert sum(one["written"] for one in told) >= runs.SIZE * 4
    assert len({hashlib.sha256((tmp_path / f"{n}.safetensors").read_bytes()).hexdigest() for n in (1, 3)}) == 1


def test_nothing_is_written_where_something_is_wrong(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps 30 to 240"):
        posthoc.synthesize(run / "single", sigma_rel=0.12, step=1000, out=tmp_path / "out.safetensors")
    assert list(tmp_path.iterdir()) == []
