"""`shardow posthoc` makes what shardow.posthoc makes, byte for byte, and says as much of it."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest
import torch
from benchmarks.command import measured
from command import COMMAND, run, told, told_json

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
    assert str(plan).splitlines()[0] in told(
        "posthoc", snapshots, "--sigma-rel", "0.15", "-o", tmp_path / "c.safetensors", *at
    )


def test_without_an_output_the_plan_is_shown(snapshots: Path, tmp_path: Path) -> None:
    plan = shardow.posthoc.plan(snapshots, sigma_rel=0.15)
    assert run("posthoc", snapshots, "--sigma-rel", "0.15", cwd=tmp_path).stdout == str(plan)
    report = told_json("posthoc", snapshots, "--sigma-rel", "0.15")
    assert (report["residual"], report["files"]) == (plan.residual, [])
    assert not list(tmp_path.iterdir())


def test_threads_change_nothing(snapshots: Path, tmp_path: Path) -> None:
    for threads in (1, 4):
        told(
            "posthoc", snapshots, "--sigma-rel", "0.2", "-o", tmp_path / f"{threads}.safetensors", "--threads", threads
        )
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "4.safetensors").read_bytes()


def test_a_sweep_is_a_table_and_writes_nothing(snapshots: Path, tmp_path: Path) -> None:
    before = states(snapshots)
    points = told_json("posthoc", snapshots, "--sweep")["points"]
    assert [point["sigma_rel"] for point in points] == sorted(point["sigma_rel"] for point in points)
    first, head, *rows = told("posthoc", snapshots, "--sweep").splitlines()
    assert first == "The error to expect at step 120 of 24 snapshots"
    assert head.split() == ["sigma_rel", "residual", "rounding"]
    assert [row.split() for row in rows] == [
        [f"{point['sigma_rel']:.3g}", f"{point['residual']:.2e}", f"{point['rounding']:.2e}"] for point in points
    ]
    assert states(snapshots) == before


def test_wrong_calls(snapshots: Path, tmp_path: Path) -> None:
    for words, status, message in (
        ([snapshots], 2, "--sweep"),
        ([snapshots, "--step", "70"], 2, "--sigma-rel"),
        ([snapshots, "--sigma-rel", "0.1", "-o", "-"], 2, "give ./-"),
        ([snapshots, "--sigma-rel", "0.9", "-o", tmp_path / "o.safetensors"], 2, "0.28"),
        ([snapshots, "--sigma-rel", "0.1", "--sweep"], 2, "excludes"),
        ([snapshots, "--sweep", "-o", tmp_path / "o.safetensors"], 2, "excludes"),
        ([snapshots, "--sweep", "--dtype", "float16"], 2, "excludes"),
        (
            [snapshots, "--sigma-rel", "0.1", "-o", tmp_path / "o.safetensors", "--max-shard-size", "1GB"],
            2,
            "goes with a directory",
        ),
        ([tmp_path, "--sigma-rel", "0.1", "-o", tmp_path / "o.safetensors"], 3, "snapshots"),
        ([snapshots, "--sigma-rel", "0.1", "--step", "5", "-o", tmp_path / "o.safetensors"], 2, "steps 10 to 120"),
    ):
        done = run("posthoc", *words)
        assert done.returncode == status, done.stderr
        assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def states(folder: Path) -> dict[Path, tuple[int, ...]]:
    """Returns what a change of a file or directory shows; reading one changes its time of access alone."""
    stats = {path: path.stat() for path in folder.rglob("*")}
    return {path: (stat.st_ino, stat.st_mode, stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def test_a_snapshot_stays_one(snapshots: Path, tmp_path: Path) -> None:
    """What would be written in its place is refused, whatever its directory is called."""
    (tmp_path / "link").symlink_to(snapshots / "snapshot-000000050")
    before = states(snapshots)
    at = snapshots / "snapshot-000000050"
    for out in (
        at,
        f"{at}/",
        tmp_path / "link",
        at / "ema-power-sigma_rel=0.05.safetensors",
        at / "ema-mine.safetensors",
    ):
        done = run("posthoc", snapshots, "--sigma-rel", "0.15", "-o", out)
        assert done.returncode == 2, out
        assert f"{at} would be no snapshot any more; write elsewhere: {snapshots}/average.safetensors" in done.stderr
        with pytest.raises(ValueError, match="would be no snapshot any more"):
            shardow.posthoc.synthesize(snapshots, sigma_rel=0.15, out=str(out))
    assert before == states(snapshots)
    told("posthoc", snapshots, "--sigma-rel", "0.15", "-o", at / "average.safetensors")  # beside a snapshot's files
    (at / "average.safetensors").unlink()
    assert shardow.posthoc.plan(snapshots, sigma_rel=0.15).snapshots == 24


def large(snapshots: Path, to: Path, elements: int) -> Path:
    """The same snapshots, of a tensor of zeros that lie nowhere."""
    for path in snapshots.rglob("*.safetensors"):
        text = path.read_bytes()
        header = json.loads(text[8 : 8 + struct.unpack("<Q", text[:8])[0]])
        del header["__metadata__"]["shardow.crc32"]
        new = json.dumps(
            {
                "__metadata__": header["__metadata__"],
                "a": {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]},
            }
        ).encode()
        (to / path.parent.name).mkdir(parents=True, exist_ok=True)
        (to / path.parent.name / path.name).write_bytes(struct.pack("<Q", len(new)) + new)
        os.truncate(to / path.parent.name / path.name, 8 + len(new) + 4 * elements)
    return to


def test_ctrl_c_leaves_what_was_there(snapshots: Path, tmp_path: Path) -> None:
    path = large(snapshots, tmp_path / "large", 2 * 10**9)
    (tmp_path / "out.safetensors").write_bytes(b"old")
    default = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    words = [COMMAND, "posthoc", path, "--sigma-rel", "0.15", "-o", tmp_path / "out.safetensors"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=default) as process:
        while not list(tmp_path.glob(".out*")) and process.poll() is None:  # until it writes
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error) == (-signal.SIGINT, b"", b"")
    assert (tmp_path / "out.safetensors").read_bytes() == b"old"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["large", "out.safetensors"]


def test_memory_is_bounded_whatever_the_size(snapshots: Path, tmp_path: Path) -> None:
    size = (1000 if os.environ.get("SHARDOW_ALL") else 20) * 10**6
    path = large(snapshots, tmp_path / "large", size)
    empty = measured([str(COMMAND), "--version"])[1]
    words = [str(COMMAND), "posthoc", str(path), "--sigma-rel", "0.15", "-o", str(tmp_path / "out.safetensors")]
    assert measured(words)[1] - empty < 64 << 20
    assert (tmp_path / "out.safetensors").stat().st_size > 4 * size
