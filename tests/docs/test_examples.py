"""Every Python example of the README and the docs runs; every C++ example stands in a C++ test, word for word. Whole C++ programs are built
and run by tests/mpi."""

from __future__ import annotations

import gc
import re
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


def test_there_are_examples() -> None:
    assert any(name.startswith("README") for name, _ in examples())


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.parametrize(("name", "code"), examples(), ids=[name for name, _ in examples()])
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


def lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().split("\n"))


@pytest.mark.parametrize(("name", "code"), examples("cpp"), ids=[name for name, _ in examples("cpp")])
def test_a_cpp_example_is_run_by_a_test(name: str, code: str) -> None:
    assert "int main(" in code or any(lines(code) in lines(test.read_text()) for test in (ROOT / "src").rglob("*_test.cc"))


def test_there_are_cpp_examples() -> None:
    assert examples("cpp")
