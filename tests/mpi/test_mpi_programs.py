"""Programs of users on MPI ranks, against the installed package: the one in docs/cpp.md, and examples/cpp."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from built import succeed
from sketches import program_of

WARNINGS = ["-std=c++20", "-Wall", "-Wextra", "-Wconversion", "-Werror"]


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_the_header_compiles_alone_and_twice(compiler: str, installed: Path, tmp_path: Path) -> None:
    found = shutil.which(compiler) or shutil.which(f"{compiler}-14")
    if found is None:
        pytest.skip(f"no {compiler}: apt-get install {'clang-14' if 'clang' in compiler else compiler}")
    (tmp_path / "twice.cc").write_text("#include <shardow/mpi.h>\n" * 2)
    flags = succeed("mpicxx", "-showme:compile").replace("-I", "-isystem").split()
    succeed(found, *WARNINGS, "-fsyntax-only", f"-I{installed / 'include'}", *flags, tmp_path / "twice.cc")
    told = succeed(
        "sh", "-c", f"{found} -std=c++20 -fsyntax-only -I{installed / 'include'} {tmp_path / 'twice.cc'} 2>&1 || true"
    )
    assert "apt-get install libopenmpi-dev" in told, "where MPI's headers are not found"


def test_the_header_s_sketch_compiles(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "sketch.cc").write_text(program_of(installed / "include" / "shardow" / "mpi.h"))
    succeed("mpicxx", *WARNINGS, "-fsyntax-only", f"-I{installed / 'include'}", tmp_path / "sketch.cc")


def ran(done: Any, *said: str) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(words in done.stdout for words in said), done.stdout


def files(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.iterdir())}


@pytest.mark.parametrize("way", ["cmake", "static", "pkg-config"])
def test_the_pages_program_goes_on_where_it_stopped(
    way: str, program_of: Callable[..., Path], mpirun: Any, tmp_path: Path
) -> None:
    if way == "pkg-config" and shutil.which("pkg-config") is None:
        pytest.skip("no pkg-config: apt-get install pkg-config")
    program = program_of(way)
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    for where in (straight, stopped):
        where.mkdir()
    in_straight, in_stopped = ("--wdir", str(straight)), ("--wdir", str(stopped))
    ran(mpirun(2, program, 100, options=in_stopped), "a new start", "saved at step 100 by 2 ranks")
    first = files(stopped / "run")
    ran(mpirun(3, program, 200, options=in_stopped), "saved at step 200 by 3 ranks")
    ran(mpirun(1, program, 200, options=in_straight), "saved at step 200 by 1 ranks")
    assert files(stopped / "run").keys() == {"ema.safetensors", "weights.safetensors"}
    assert files(stopped / "run") == files(straight / "run"), "weights, averages and their state"
    assert files(stopped / "run") != first
    (stopped / "run" / "weights.safetensors").unlink()
    done = mpirun(2, program, 300, options=in_stopped)
    assert done.returncode != 0, "half of a checkpoint is no new start"
    assert "weights.safetensors" in done.stderr


def test_the_pages_background_save_is_what_the_other_program_saves(
    program_of: Callable[..., Path], mpirun: Any, tmp_path: Path
) -> None:
    options = ("--wdir", str(tmp_path))
    ran(mpirun(3, program_of("cmake"), 100, options=options))
    ran(mpirun(2, program_of("cmake", 1), options=options), "rank 0 wrote 128000 bytes", "rank 1 wrote 128000 bytes")
    assert (tmp_path / "background.safetensors").read_bytes() == (tmp_path / "run" / "ema.safetensors").read_bytes()
