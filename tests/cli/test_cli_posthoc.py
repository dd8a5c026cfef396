"""`shardow posthoc` makes what shardow.posthoc makes, byte for byte, and says as much of it."""

from __future__ import annotations

import json
import os
import signal
import stat
import struct
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from benchmarks.command import measured
from command import COMMAND, run, told, told_json, wait_until_it_waits

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


def test_a_sweep_is_a_picture_and_writes_nothing_else(snapshots: Path, tmp_path: Path) -> None:
    points = told_json("posthoc", snapshots, "--sweep", tmp_path / "sweep.svg")["points"]
    assert ElementTree.parse(tmp_path / "sweep.svg").getroot().tag.endswith("svg")
    assert [one.name for one in tmp_path.iterdir()] == ["sweep.svg"]
    assert [point["sigma_rel"] for point in points] == sorted(point["sigma_rel"] for point in points)
    assert "the error to expect at step 120 of 24 snapshots" in told(
        "posthoc", snapshots, "--sweep", tmp_path / "sweep.svg"
    )


def test_wrong_calls(snapshots: Path, tmp_path: Path) -> None:
    for words, status, message in (
        ([snapshots], 2, "--sweep"),
        ([snapshots, "--step", "70"], 2, "--sigma-rel"),
        ([snapshots, "--sigma-rel", "0.1", "-o", "-"], 2, "give ./-"),
        ([snapshots, "--sigma-rel", "0.9", "-o", tmp_path / "o.safetensors"], 2, "0.28"),
        ([snapshots, "--sigma-rel", "0.1", "--sweep", tmp_path / "x.svg"], 2, "excludes"),
        ([snapshots, "--sweep", tmp_path / "x.svg", "-o", tmp_path / "o.safetensors"], 2, "excludes"),
        ([snapshots, "--sweep", tmp_path / "x.svg", "--dtype", "float16"], 2, "excludes"),
        ([snapshots, "--sweep", tmp_path / "x.png"], 2, "ends in .svg"),
        ([snapshots, "--sweep", tmp_path / "x"], 2, "ends in .svg"),
        ([snapshots, "--sweep", tmp_path / "no" / "x.svg"], 3, "No such file"),
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


def test_a_picture_goes_where_its_path_leads(snapshots: Path, tmp_path: Path) -> None:
    """As with cp: links stay and what they lead to is replaced, pipes and devices are written to."""
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.svg"
    link.symlink_to("there/picture.svg")
    told("posthoc", snapshots, "--sweep", link)
    picture = (tmp_path / "there" / "picture.svg").read_bytes()
    assert picture.startswith(b"<svg")
    (tmp_path / "there" / "picture.svg").write_text("old")
    (tmp_path / "there" / "picture.svg").chmod(0o600)
    told("posthoc", snapshots, "--sweep", link)
    assert link.is_symlink()
    assert (tmp_path / "there" / "picture.svg").read_bytes() == picture
    assert (tmp_path / "there" / "picture.svg").stat().st_mode & 0o777 == 0o600
    os.mkfifo(tmp_path / "fifo")
    with subprocess.Popen(
        [COMMAND, "posthoc", snapshots, "--sweep", tmp_path / "fifo"], stdout=subprocess.DEVNULL
    ) as process:
        assert (tmp_path / "fifo").read_bytes() == picture
        assert process.wait(30) == 0
    assert (tmp_path / "fifo").is_fifo()
    if os.geteuid() == 0:  # may make devices
        os.mknod(tmp_path / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        told("posthoc", snapshots, "--sweep", tmp_path / "null")
        assert (tmp_path / "null").is_char_device()
        (tmp_path / "null").unlink()
    (tmp_path / "folder.svg").mkdir()
    assert "Is a directory" in run("posthoc", snapshots, "--sweep", tmp_path / "folder.svg").stderr
    assert sorted(one.name for one in tmp_path.iterdir()) == ["fifo", "folder.svg", "link.svg", "there"]


def test_a_picture_on_standard_output_is_all_there_is(snapshots: Path, tmp_path: Path) -> None:
    assert told("posthoc", snapshots, "--sweep", "/dev/stdout").endswith("</svg>\n")
    with (tmp_path / "x.svg").open("w") as file:
        subprocess.run([COMMAND, "posthoc", snapshots, "--sweep", "/dev/stdout"], stdout=file, check=True)
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")
    assert "would both write" in run("posthoc", snapshots, "--sweep", "/dev/stdout", "--json").stderr
    assert "No space left" in run("posthoc", snapshots, "--sweep", "/dev/full").stderr


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
    os.mkfifo(tmp_path / "fifo")  # that nobody reads
    with subprocess.Popen([COMMAND, "posthoc", snapshots, "--sweep", tmp_path / "fifo"], preexec_fn=default) as process:
        wait_until_it_waits(process, "wait_for_partner")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT


def test_memory_is_bounded_whatever_the_size(snapshots: Path, tmp_path: Path) -> None:
    size = (1000 if os.environ.get("SHARDOW_ALL") else 20) * 10**6
    path = large(snapshots, tmp_path / "large", size)
    empty = measured([str(COMMAND), "--version"])[1]
    words = [str(COMMAND), "posthoc", str(path), "--sigma-rel", "0.15", "-o", str(tmp_path / "out.safetensors")]
    assert measured(words)[1] - empty < 64 << 20
    assert (tmp_path / "out.safetensors").stat().st_size > 4 * size
