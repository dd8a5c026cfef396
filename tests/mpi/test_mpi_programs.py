"""Programs of users on MPI ranks, against the installed package: the one in docs/cpp.md, and examples/cpp."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from built import succeed

WARNINGS = ["-std=c++20", "-Wall", "-Wextra", "-Wconversion", "-Wno-sign-conversion", "-Werror"]


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_the_header_compiles_alone_and_twice(compiler: str, installed: Path, tmp_path: Path) -> None:
    found = shutil.which(compiler) or shutil.which(f"{compiler}-14")
    if found is None:
        pytest.skip(f"no {compiler}: apt-get install {'clang-14' if 'clang' in compiler else compiler}")
    (tmp_path / "twice.cc").write_text("#include <shardow/mpi.h>\n" * 2)
    flags = succeed("mpicxx", "-showme:compile").replace("-I", "-isystem").split()
    succeed(found, *WARNINGS, "-fsyntax-only", f"-I{installed / 'include'}", *flags, tmp_path / "twice.cc")
    told = succeed("sh", "-c", f"{found} -std=c++20 -fsyntax-only -I{installed / 'include'} {tmp_path / 'twice.cc'} 2>&1 || true")
    assert "apt-get install libopenmpi-dev" in told, "where MPI's headers are not found"


@pytest.mark.parametrize("way", ["cmake", "static", "pkg-config"])
def test_the_pages_program_goes_on_where_it_stopped(way: str, program_of: Callable[[str], Path], mpirun: Any, tmp_path: Path) -> None:
    if way == "pkg-config" and shutil.which("pkg-config") is None:
        pytest.skip("no pkg-config: apt-get install pkg-config")
    program = program_of(way)
    for ranks, said in [(2, "saved at step 100 by 2 ranks"), (3, "saved at step 200 by 3 ranks")]:
        done = mpirun(ranks, program, options=("--wdir", str(tmp_path)))
        assert said in done.stdout, done.stdout + done.stderr
