"""The demo, run as a user runs it. Every sharding with SHARDOW_ALL; FSDP2 otherwise."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
ALL = bool(os.environ.get("SHARDOW_ALL"))
SHARDINGS = [("fsdp2", 2), ("fsdp1", 2), ("hsdp", 4), ("ddp", 2), ("plain", 1)] if ALL else [("fsdp2", 2)]


def demo(
    *flags: str, timeout: float = 280, start: tuple[str, ...] = ("-m", "examples.digits"), cwd: Path = ROOT
) -> Any:
    return subprocess.run(
        [sys.executable, *start, *flags], cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture(scope="module", params=SHARDINGS, ids=lambda p: p[0])
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    shard, ranks = request.param
    out = tmp_path_factory.mktemp(shard)
    return demo("--quick", "--shard", shard, "--ranks", str(ranks), "--out", str(out)), out


def test_says_that_the_averages_came_back(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, _ = finished
    assert done.returncode == 0, done.stdout + done.stderr
    assert "what was saved came back bit for bit on" in done.stdout
    assert "Traceback" not in done.stderr
    assert "terminate" not in done.stderr


def test_says_how_long_each_part_took(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    lines = re.findall(r"^Part \d of 2|^  took (?=\d+ s$)", finished[0].stdout, re.M)
    assert lines == ["Part 1 of 2", "  took ", "Part 2 of 2", "  took "]


def test_results_hold_what_the_report_claims(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    results = json.loads((finished[1] / "results.json").read_text())
    train, resume = results["train"], results["resume"]
    assert train["hashes"] == resume["hashes"] == [*resume["file_hashes"], train["hashes"][-1]]
    assert not set(train["hashes"]) & set(resume["before"])  # nothing but the checkpoint made them equal
    assert train["swap"]
    parameters, ranks = train["parameters"], int(results["options"]["ranks"])
    sharing = 1 if results["options"]["shard"] == "plain" else ranks
    assert sum(train["bytes"]) <= 2 * (4 * parameters + 64 * ranks * 60)
    assert max(train["bytes"]) <= 2 * 4 * parameters / sharing * 1.3 + 64 * 120


def test_averages_made_afterwards_draw_as_tracked_ones(
    finished: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    results = json.loads((finished[1] / "results.json").read_text())["train"]["afterwards"]
    plans, tracked, made = results["plans"], results["tracked"], results["made"]
    assert list(tracked) == ["0.07", "0.15", "0.2"]
    assert all(plans[width]["residual"] < 0.2 and plans[width]["snapshots"] == 48 for width in tracked)
    assert all(abs(distance - made[width]) < 0.2 * distance for width, distance in tracked.items())
    assert results["raw"] == 12
    assert len(results["merges"]) == 3
    assert "raw checkpoints: mean of the last three" in (finished[1] / "report.html").read_text()


def test_files_load_elsewhere_and_are_those_averages(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, out = finished
    results = json.loads((out / "results.json").read_text())
    digest = hashlib.sha256()
    found = load_file(out / "exported" / "model.safetensors")
    for name in sorted(found):
        digest.update(f"{name} {tuple(found[name].shape)} {torch.float32}".encode())
        digest.update(found[name].float().contiguous().numpy().tobytes())
    assert digest.hexdigest() == results["train"]["hashes"][-2]  # the last one is of the weights


def test_report_needs_nothing_else(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, out = finished
    page = (out / "report.html").read_text()
    sources = re.findall(r'(?:src|srcset|href)="([^"]{0,40})', page)
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert len(list((out / "figures").glob("*.png"))) == 5
    opening = page.split("<main>")[1].split("</p>")[0]  # one picture, then the result in one sentence
    assert opening.count("<img") == 1
    assert json.loads((out / "results.json").read_text())["result"] in opening
    assert not re.search(r"\bnan\b|None", re.sub(r"base64,[^\"]*", "", page))


@pytest.mark.parametrize("page", ["merging.md", "posthoc.md"])
def test_the_pages_commands_work_on_the_demos_checkpoints(
    finished: tuple[subprocess.CompletedProcess[str], Path], page: str, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    shutil.copytree(finished[1], tmp_path / "out" / "demo")
    text = (ROOT / "docs" / page).read_text()
    commands = [
        line
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        if "out/demo" in block
        for line in block.splitlines()
    ]
    assert len(commands) >= 2
    environment = {**os.environ, "PATH": f"{ROOT / 'build' / 'release'}:{os.environ['PATH']}"}
    for command in commands:
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == (1 if command.startswith("shardow diff") else 0), (
            command + done.stderr
        )  # 1: they differ
    for name in re.findall(r"`out/demo/(figures/.*?)`", text):
        assert (finished[1] / name).is_file()
        assert (ROOT / "docs" / "pictures" / f"demo_{Path(name).name}").is_file()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--ranks", "0"), "--ranks must be at least 1"),
        (("--steps", "5"), "--steps must be at least 6"),
        (("--decays", "0.9,0.9"), "--decays are different numbers"),
        (("--decays", "high"), "is no list of numbers"),
        (("--shard", "none"), "invalid choice"),
        (("--width", "60"), "--width must be a multiple of 8"),
        (("--samples", "10"), "--samples must be at least 64"),
    ],
)
def test_bad_flags_are_refused_at_once(flags: tuple[str, ...], said: str) -> None:
    done = demo(*flags)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_rank_that_fails_ends_the_demo_with_its_message(tmp_path: Path) -> None:
    """It is started by its path, from where other examples are."""
    (tmp_path / "checkpoint").write_text("a file where the demo wants a directory")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "__init__.py").touch()
    flags = ["--quick", "--steps=6", "--epochs=1", "--samples=64", "--shard=plain", "--ranks=1", "--out=."]
    done = demo(*flags, f"--use_ema={ALL}", start=(str(ROOT / "examples" / "digits"),), cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"The demo stopped: rank \d: .*File exists: 'checkpoint'", done.stderr), done.stderr
    assert "Traceback" in (tmp_path / "error.txt").read_text()
