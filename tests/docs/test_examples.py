"""Every Python example of the README and the docs runs; every C++ example stands in a C++ test, word for word. Whole
C++ programs are built and run by tests/install, and the sketches of docs/cpp_reference.md compiled by tests/install and
tests/libtorch.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardow

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]


def examples(language: str = "python") -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for number, block in enumerate(re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL), 1):
            found.append((f"{page.relative_to(ROOT)}:{number}", block))
    return found


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    gc.collect()
    dist.destroy_process_group()


FIRST, *REST = examples()


def test_the_readme_s_first_example_is_a_distributed_loop_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FIRST[1])
    command = re.search(r"torchrun .* train.py", FIRST[1])
    assert FIRST[0].startswith("README")
    assert command
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[0].split()[1:]], cwd=tmp_path, capture_output=True,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=240,
    )  # fmt: skip
    # The second text is torch's: docs/torch.md.
    assert run.returncode == 0 or "terminate called without an active exception" in run.stderr, run.stderr
    assert run.stdout.count("tensor([") == 2
    for path, dtype in (("run/ema.safetensors", torch.float32), ("run/model", torch.bfloat16)):
        with shardow.open(tmp_path / path) as opened:
            assert {opened[name].dtype for name in opened} == {dtype}
            assert sum(opened[name].numel() for name in opened) == 8 * 64 + 64 + 64 * 8 + 8


@pytest.mark.parametrize(("name", "code"), REST, ids=[name for name, _ in REST])
def test_example_runs(name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: DeviceMesh) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(8)).sum().backward()
    space: dict[str, Any] = {
        "shardow": shardow,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "mesh": mesh,
        "batches": [torch.ones(8), torch.zeros(8)],
        "evaluate": lambda m: m(torch.ones(8)),
    }
    exec(compile(code.replace("...", "pass"), name, "exec"), space)
    assert "shardow." in code, "an example shows shardow at work"


def test_the_recipes_are_all_there_and_short() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    shown = re.findall(r"```\{literalinclude\} \.\./(examples/\w+\.py)", page)
    assert shown == re.findall(r"\]\(\.\./(examples/\w+\.py)\)", page)
    programs = {f"examples/{one.name}" for one in (ROOT / "examples").glob("[!_]*.py")}
    assert programs - {*shown} == {"examples/test_examples.py"}
    for program in shown:
        most = {"examples/dino.py": 120}.get(program, 80)
        assert 45 <= len((ROOT / program).read_text().splitlines()) <= most, program


def lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().split("\n"))


WORD_FOR_WORD = [(name, code) for name, code in examples("cpp") if not name.startswith("docs/cpp_reference.md")]


@pytest.mark.parametrize(("name", "code"), WORD_FOR_WORD, ids=[name for name, _ in WORD_FOR_WORD])
def test_a_cpp_example_is_run_by_a_test(name: str, code: str) -> None:
    assert "int main(" in code or any(
        lines(code) in lines(test.read_text()) for test in (ROOT / "src").rglob("*_test.cc")
    )


def test_there_are_cpp_examples() -> None:
    assert WORD_FOR_WORD
