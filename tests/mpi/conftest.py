"""Programs on MPI ranks: what they need is looked for once, and named where it is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from built import BUILD, CMAKE, ROOT, Launch, install, run, succeed


@pytest.fixture(scope="session")
def mpirun() -> Launch:
    """mpirun(ranks, program, arguments...), as tests/mpi/mpirun starts it; ``options`` are mpirun's own."""
    if shutil.which("mpirun") is None or not (BUILD / "mpi_test").exists():
        pytest.skip("no MPI: apt-get install libopenmpi-dev openmpi-bin")

    def launch(ranks: int, *words: object, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        return run(ROOT / "tests" / "mpi" / "mpirun", ranks, *options, *words)

    return launch


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, mpirun: Launch) -> Path:
    return install(tmp_path_factory)


@pytest.fixture(scope="session")
def program_of(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> Callable[..., Path]:
    """program_of(way, number): a C++ program that stands in docs/cpp.md, built as it says there; "cmake", "static" or
    "pkg-config".
    """

    @cache
    def build(way: str, number: int = 0) -> Path:
        text = (ROOT / "docs" / "cpp.md").read_text()
        source = tmp_path_factory.mktemp("program")
        blocks = [block for block in re.findall(r"```cpp\n(.*?)```", text, re.DOTALL) if "int main(" in block]
        (source / "main.cc").write_text(blocks[number])
        (lists,) = re.findall(r"```cmake\n(.*?)```", text, re.DOTALL)
        if way == "pkg-config":
            (line,) = re.findall(r"`(mpicxx [^`]*)`", text)
            places = {
                "PKG_CONFIG_PATH": f"{installed}/lib/pkgconfig",
                "LIBRARY_PATH": f"{installed}/lib",
                "LD_RUN_PATH": f"{installed}/lib",
            }
            succeed("sh", "-c", f"cd {source} && {line} -o average", **places)
            return source / "average"
        (source / "CMakeLists.txt").write_text(
            lists.replace("COMPONENTS mpi", "COMPONENTS mpi static") if way == "static" else lists
        )
        succeed(CMAKE, "-S", source, "-B", source / "build", f"-DCMAKE_PREFIX_PATH={installed}")
        succeed(CMAKE, "--build", source / "build")
        return source / "build" / "average"

    return build
