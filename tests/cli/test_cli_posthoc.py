"""`shardow posthoc` makes what shardow.posthoc makes, byte for byte, and says as much of it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from command import run, told, told_json

import shardow


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "snapshots"
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 30)
    ema = shardow.EMA(model, decay=[shardow.schedules.power(0.05), shardow.schedules.power(0.1)])
    for _ in range(120):
        with torch.no_grad():
            model.weight.add_(torch.randn_like(model.weight), alpha=0.01)
        ema.update()
        ema.snapshot(path, every=10)
    return path


@pytest.mark.parametrize("step", [None, 70])
def test_it_is_what_python_makes(snapshots: Path, tmp_path: Path, step: int | None) -> None:
    at = [] if step is None else ["--step", step]
    found = told_json("posthoc", snapshots, "--sigma-rel", "0.15", "-o", tmp_path / "a.safetensors", *at)
    shardow.posthoc.synthesize(snapshots, sigma_rel=0.15, step=step, out=tmp_path / "b.safetensors")
    assert "equal, 2 tensors" in told("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    plan = shardow.posthoc.plan(snapshots, sigma_rel=0.15, step=step)
    assert found["step"] == (step or 120)
    assert found["residual"] == plan.residual
    assert sum(term["coefficient"] for term in found["terms"]) == pytest.approx(1)
    told("verify", tmp_path / "a.safetensors")
    assert str(plan).splitlines()[0] in told("posthoc", snapshots, "--sigma-rel", "0.15", "-o", tmp_path / "c.safetensors", *at)


def test_threads_change_nothing(snapshots: Path, tmp_path: Path) -> None:
    for threads in (1, 4):
        told("posthoc", snapshots, "--sigma-rel", "0.2", "-o", tmp_path / f"{threads}.safetensors", "--threads", threads)
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "4.safetensors").read_bytes()


def test_a_sweep_is_a_picture_and_writes_nothing_else(snapshots: Path, tmp_path: Path) -> None:
    points = told_json("posthoc", snapshots, "--sweep", tmp_path / "sweep.svg")["points"]
    assert ElementTree.parse(tmp_path / "sweep.svg").getroot().tag.endswith("svg")
    assert [one.name for one in tmp_path.iterdir()] == ["sweep.svg"]
    assert [point["sigma_rel"] for point in points] == sorted(point["sigma_rel"] for point in points)
    assert "the error to expect at step 120 of 24 snapshots" in told("posthoc", snapshots, "--sweep", tmp_path / "sweep.svg")


def test_wrong_calls(snapshots: Path, tmp_path: Path) -> None:
    for words, status, message in (
        ([snapshots], 2, "--sweep"),
        ([snapshots, "--sigma-rel", "0.1"], 2, "-o"),
        ([snapshots, "--sigma-rel", "0.9", "-o", tmp_path / "o.safetensors"], 2, "0.28"),
        ([snapshots, "--sigma-rel", "0.1", "--sweep", tmp_path / "x.svg"], 2, "excludes"),
        ([tmp_path, "--sigma-rel", "0.1", "-o", tmp_path / "o.safetensors"], 3, "snapshots"),
        ([snapshots, "--sigma-rel", "0.1", "--step", "5", "-o", tmp_path / "o.safetensors"], 2, "steps 10 to 120"),
    ):
        done = run("posthoc", *words)
        assert done.returncode == status, done.stderr
        assert message in done.stderr
    assert list(tmp_path.iterdir()) == []
