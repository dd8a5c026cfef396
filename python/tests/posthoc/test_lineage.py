"""Which snapshots are a run's past is known from its state, not guessed from what lies in a directory: after any
resumes, what is synthesised keeps its promise against an EMA that averaged the very steps that the run took."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
import snapshot_runs as runs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import shardow
from shardow import posthoc, schedules

TWO = (0.05, 0.1)


class Run:
    """A run whose weights differ from those of every other attempt; what it is made of is kept for an EMA that tracks
    it.
    """

    def __init__(
        self, directory: Path, attempt: int = 0, past: list[torch.Tensor] | None = None, **options: Any
    ) -> None:
        self.model, self.ema = runs.started(runs.powers(*TWO), **options)
        self.directory, self.attempt, self.seen = directory, attempt, list(past or [runs.weights(0)])

    def to(self, last: int, every: int = 20, called: bool = True) -> Run:
        for step in range(self.ema.step + 1, last + 1):
            with torch.no_grad():
                self.model.weight.copy_(runs.weights(step) + 20 * self.attempt)
            self.seen.append(self.model.weight.detach().clone())
            self.ema.update()
            if called:
                self.ema.snapshot(self.directory, every)
        return self

    def resumed(self, state: Any, step: int, attempt: int, **options: Any) -> Run:
        later = Run(self.directory, attempt, self.seen[: step + 1])
        later.ema.load_state_dict(state, **options)
        assert later.ema.step == step
        return later

    def off(self, step: int | None = None, width: float = 0.08) -> tuple[float, float]:
        """(how far the furthest weight is from the tracked one, what was promised there)."""
        found = posthoc.synthesize(self.directory, sigma_rel=width, step=step, out=self.directory / "out.safetensors")[
            "plan"
        ]
        seen = torch.stack(self.seen[: found.step + 1])
        model, ema = runs.started(schedules.power(width))
        for one in seen[1:]:
            with torch.no_grad():
                model.weight.copy_(one)
            ema.update()
        with shardow.open(self.directory / "out.safetensors") as opened:
            out = torch.as_tensor(opened["weight"])
        off = (out - ema.state_dict()["averages"]["weight"]).abs()
        promised = found.variation * (seen.amax(0) - seen.amin(0)) + found.rounding * seen.abs().amax(0) + 1e-12
        worst = int((off / promised).argmax())
        return float(off[worst]), float(promised[worst])


def test_the_promise_holds_after_two_resumes(tmp_path: Path) -> None:
    first = Run(tmp_path).to(50)
    state = first.ema.state_dict()
    first.to(100)
    # Takes none up to 72, where those of the given-up future still lie.
    second = first.resumed(state, 50, 1).to(72, every=100)
    third = second.resumed(second.ema.state_dict(), 72, 2)
    third.to(150, every=25)
    off, promised = third.off()
    assert off <= promised
    found = posthoc.plan(tmp_path, 0.08)
    # 73 makes up for 50.
    assert (found.step, {one.step for one in found.terms}) == (150, {20, 40, 73, 75, 100, 125, 150})
    assert [text.partition(":")[0][-3:] for text in found.left_out] == ["060", "080"]


@pytest.mark.parametrize("way", ["state dict", "file", "torch.save", "dcp", "snapshot", "checkpoints"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_however_the_state_was_kept(way: str, tmp_path: Path) -> None:
    first = Run(tmp_path / "snapshots").to(40 if way == "snapshot" else 47)
    step, ema, where = first.ema.step, first.ema, tmp_path / "kept"
    if way == "dcp":
        dcp.save({"ema": ema.state_dict()}, checkpoint_id=where, no_dist=True)
    elif way == "torch.save":
        torch.save(ema.state_dict(), where)
    elif way == "checkpoints":
        shardow.Checkpoints(where).save(step, first.model, averages=ema)
    else:
        ema.save(where)
    kept = ema.state_dict()
    first.to(90)
    second = Run(tmp_path / "snapshots", 1, first.seen[: step + 1])
    if way == "dcp":
        state = {"ema": second.ema.state_dict()}
        dcp.load(state, checkpoint_id=where, no_dist=True)
        second.ema.load_state_dict(state["ema"])
    elif way == "torch.save":
        second.ema.load_state_dict(torch.load(where, weights_only=True))
    elif way == "checkpoints":
        shardow.Checkpoints(where).restore(second.model, averages=second.ema)
    elif way == "snapshot":
        second.ema.load(tmp_path / "snapshots" / "snapshot-000000040")
    elif way == "file":
        second.ema.load(where)
    else:
        second.ema.load_state_dict(kept)
    second.to(75)
    off, promised = second.off()
    assert off <= promised
    found = posthoc.plan(tmp_path / "snapshots", 0.08)
    assert (found.step, {one.step for one in found.terms}) == (60, {20, 40, 60})
    assert len(found.left_out) == 1


def test_by_default_the_run_that_is_present_at_any_step_that_it_reaches(tmp_path: Path) -> None:
    first = Run(tmp_path).to(50)
    state = first.ema.state_dict()
    first.to(200)
    for attempt in (1, 2):  # stopped twice on the way: each begins at 50 again
        last = first.resumed(state, 50, attempt).to(130, every=30 if attempt == 2 else 70)
    assert posthoc.plan(tmp_path, 0.08).step == 120
    for step, steps in ((100, {20, 40, 60, 90}), (115, {20, 40, 60, 90}), (60, {20, 40, 60})):
        assert {one.step for one in posthoc.plan(tmp_path, 0.08, step=step).terms} == steps
        off, promised = last.off(step)
        assert off <= promised
    # 60 and 120 are left out.
    assert {one.step for one in posthoc.plan(tmp_path, 0.08, step=200).terms} == {20, 40, 80, 100, 140, 160, 180, 200}
    off, promised = first.off(200)
    assert off <= promised
    assert posthoc.sweep(tmp_path).step == 120


def test_runs_beside_each_other_are_an_error_that_names_them(tmp_path: Path) -> None:
    first = Run(tmp_path).to(50)
    state = first.ema.state_dict()
    second, third = (first.resumed(state, 50, attempt) for attempt in (1, 2))
    for one in (second, third):  # both look before either has saved
        one.to(51)
    second.to(60)
    third.to(71, every=70)
    with pytest.raises(
        ValueError,
        match=r"2 runs .*: give the step, of one of their last: step 70 \(snapshot-000000070\), step 60 \(snap",
    ):
        posthoc.plan(tmp_path, 0.08)
    for step, run in ((60, second), (70, third)):
        assert {one.step for one in posthoc.plan(tmp_path, 0.08, step=step).terms} == {20, 40, step}
        off, promised = run.off(step)
        assert off <= promised
    assert posthoc.plan(tmp_path, 0.08, step=45).step == 45  # before they part, there is one


def test_two_emas_in_one_directory_are_an_error(tmp_path: Path) -> None:
    one, other = Run(tmp_path, 0), Run(tmp_path, 1)
    one.to(19), other.to(19)
    one.to(20)
    before = (tmp_path / "snapshot-000000020" / "ema-power-sigma_rel=0.05.safetensors").read_bytes()
    with pytest.raises(ValueError, match="was written by another EMA, or another job"):
        other.to(20)
    assert (tmp_path / "snapshot-000000020" / "ema-power-sigma_rel=0.05.safetensors").read_bytes() == before
    one.to(40)
    third = runs.started([0.5, 0.6])[1]
    third.update()
    with pytest.raises(ValueError, match=r"averages power.*, this EMA keeps 0.5, 0.6; give another directory"):
        third.snapshot(tmp_path, 1)


def test_a_state_without_a_past_takes_none(tmp_path: Path) -> None:
    first = Run(tmp_path).to(45)
    state = first.ema.state_dict()
    bare = {
        **state,
        "state": json.dumps({key: value for key, value in json.loads(state["state"]).items() if key != "snapshots"}),
    }
    second = first.resumed(bare, 45, 0)
    second.to(61)
    found = posthoc.plan(tmp_path, 0.08)
    assert (found.step, {one.step for one in found.terms}) == (60, {60})
    off, promised = second.off()
    assert off <= promised


def test_a_process_between_that_takes_no_snapshots_is_part_of_the_past(tmp_path: Path) -> None:
    first = Run(tmp_path).to(45)
    second = first.resumed(first.ema.state_dict(), 45, 1).to(53, called=False)
    kept = second.ema.state_dict()
    assert second.ema.state_dict()["state"] == kept["state"]
    second.to(58, called=False)
    third = second.resumed(second.ema.state_dict(), 58, 2)
    third.to(80)
    assert [one["updates"] for one in json.loads(third.ema.state_dict()["state"])["snapshots"]["segments"]] == [
        [[1, 1, 45]], [[46, 1, 13]], [[59, 1, 22]]
    ]  # fmt: skip
    off, promised = third.off()
    assert off <= promised
    assert {one.step for one in posthoc.plan(tmp_path, 0.08).terms} == {20, 40, 60, 80}


@pytest.mark.parametrize(
    "options", [{"update_every": 3}, {"start_step": 30}, {"update_every": 2, "start_step": 7}], ids=str
)
def test_other_updates_over_a_resume(options: dict[str, int], tmp_path: Path) -> None:
    first = Run(tmp_path, **options).to(47)
    later = Run(tmp_path, 0, first.seen, **options)
    later.ema.load_state_dict(first.ema.state_dict())
    later.to(121)
    whole = Run(tmp_path / "whole", **options).to(121)
    found, expected = (posthoc.plan(one.directory, 0.08) for one in (later, whole))
    assert [(one.step, one.coefficient) for one in found.terms] == [
        (one.step, one.coefficient) for one in expected.terms
    ]
    assert (found.residual, found.variation) == (expected.residual, expected.variation)


def test_a_decay_that_changes_at_a_resume_is_the_averages_own_mixture(tmp_path: Path) -> None:
    """Asked for again, with the decay of either part alone, the promise is large, and holds."""
    first = Run(tmp_path)
    first.model, first.ema = runs.started([0.9, 0.98])
    first.to(60)
    second = Run(tmp_path, 1, first.seen)
    second.model, second.ema = runs.started([0.95, 0.99])
    second.ema.load_state_dict(first.ema.state_dict(), options="own")
    second.to(140)
    for width in (0.1, 0.2):
        off, promised = second.off(width=width)
        assert off <= promised
    assert posthoc.plan(tmp_path, schedule=0.95).residual > 1e-6


def test_before_the_first_update_nothing_is_due(tmp_path: Path) -> None:
    model, ema = runs.started(runs.powers(*TWO))
    assert ema.snapshot(tmp_path, 1) is None
    assert "snapshots" not in json.loads(runs.started(0.9)[1].state_dict()["state"])
    runs.go_on(model, ema, range(1, 4), tmp_path, 1)
    assert runs.steps_there(tmp_path) == [1, 2, 3]
    assert posthoc.plan(tmp_path, 0.08).step == 3


PROGRAM = """
import os, sys, shardow, torch
model = torch.nn.Linear(700, 700)
ema = shardow.EMA(model, decay=[shardow.schedules.power(0.05), shardow.schedules.power(0.1)])
for step in range(1, 1000):
    ema.update()
    ema.snapshot(sys.argv[1], 1)
    print(step, flush=True)
"""


def test_killed_halfway_a_snapshot_is_whole_or_not_there(tmp_path: Path) -> None:
    for attempt in range(2):
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout
        for step in process.stdout:
            if int(step) == 5 + 3 * attempt:
                break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        found = posthoc.plan(tmp_path, 0.08)
        assert found.step >= 5 + 3 * attempt
        assert found.snapshots == 2 * found.step
        posthoc.synthesize(tmp_path, 0.08, out=tmp_path / "out.safetensors")


def _sharded(directory: str, stop: int, every: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(6, 5)
    fully_shard(model)
    ema = shardow.EMA(model, decay=runs.powers(*TWO))
    if (Path(directory) / "ema").exists():
        ema.load(f"{directory}/ema")
    for step in range(ema.step + 1, stop + 1):
        runs.put_everywhere(model, step)
        ema.update()
        ema.snapshot(f"{directory}/snapshots", every)
        if step == stop // 2:
            ema.save(f"{directory}/ema")
    dist.barrier()


def test_a_future_is_given_up_at_another_world_size(tmp_path: Path) -> None:
    ranks.run(2, _sharded, str(tmp_path), 60, 10)  # saved at 30, went on to 60
    ranks.run(3, _sharded, str(tmp_path), 45, 15)  # from 30
    found = posthoc.plan(tmp_path / "snapshots", 0.08)
    assert (found.step, {one.step for one in found.terms}) == (45, {10, 20, 30, 45})
    assert len(found.left_out) == 3
