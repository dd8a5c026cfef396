"""The programs of docs/cpp.md, built as the page says and run against the installed package."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
from built import CMAKE, ROOT, contents, install, named, succeed

Program = Callable[..., Path]


@pytest.fixture(scope="module")
def program_of(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """program_of(way, number): a C++ program that stands in docs/cpp.md, built as it says there; "cmake", "static" or
    "pkg-config".
    """
    installed = install(tmp_path_factory)

    @cache
    def build(way: str, number: int = 0) -> Path:
        text = (ROOT / "docs" / "cpp.md").read_text()
        source = tmp_path_factory.mktemp("program")
        blocks = [block for block in re.findall(r"```cpp\n(.*?)```", text, re.DOTALL) if "int main(" in block]
        (source / "main.cc").write_text(blocks[number])
        (lists,) = re.findall(r"```cmake\n(.*?)```", text, re.DOTALL)
        if way == "pkg-config":
            (line,) = re.findall(r"`(g\+\+ [^`]*)`", text)
            places = {
                "PKG_CONFIG_PATH": f"{installed}/lib/pkgconfig",
                "LIBRARY_PATH": f"{installed}/lib",
                "LD_RUN_PATH": f"{installed}/lib",
            }
            succeed("sh", "-c", f"cd {source} && {line} -o average", **places)
            return source / "average"
        (source / "CMakeLists.txt").write_text(
            lists.replace("REQUIRED)", "REQUIRED COMPONENTS static)", 1) if way == "static" else lists
        )
        succeed(CMAKE, "-S", source, "-B", source / "build", f"-DCMAKE_PREFIX_PATH={installed}")
        succeed(CMAKE, "--build", source / "build")
        return source / "build" / "average"

    return build


def ran(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], cwd=folder, capture_output=True, text=True, timeout=280)


def well(done: subprocess.CompletedProcess[str], *said: str) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(words in done.stdout for words in said), done.stdout


@pytest.mark.parametrize("way", ["cmake", "static", "pkg-config"] if os.environ.get("SHARDOW_ALL") else ["pkg-config"])
def test_the_pages_program_goes_on_where_it_stopped(way: str, program_of: Program, tmp_path: Path) -> None:
    if way == "pkg-config" and shutil.which("pkg-config") is None:
        pytest.skip("no pkg-config: apt-get install pkg-config")
    program = program_of(way)
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    straight.mkdir()
    stopped.mkdir()
    in_straight, in_stopped = partial(ran, straight, program), partial(ran, stopped, program)
    well(in_stopped(100, 2), "a new start", "saved at step 100 by 2 ranks")
    first = contents(stopped / "run")
    well(in_stopped(200, 3), "saved at step 200 by 3 ranks")
    well(in_straight(200), "saved at step 200 by 1 ranks")
    assert contents(stopped / "run").keys() == {"ema.safetensors", "weights.safetensors"}
    assert contents(stopped / "run") == contents(straight / "run"), "weights, averages and their state"
    assert contents(stopped / "run") != first
    named(stopped / "run")["weights.safetensors"].unlink()
    done = in_stopped(300, 2)
    assert done.returncode != 0, "half of a checkpoint is no new start"
    assert "weights-" in done.stderr


def test_the_pages_background_save_is_what_the_other_program_saves(program_of: Program, tmp_path: Path) -> None:
    well(ran(tmp_path, program_of("cmake"), 100, 3))
    written = ran(tmp_path, program_of("cmake", 1), 2)
    well(written, "rank 0 wrote 128000 bytes", "rank 1 wrote 128000 bytes")
    assert (tmp_path / "background.safetensors").read_bytes() == (tmp_path / "run" / "ema.safetensors").read_bytes()


def test_the_pages_store_makes_a_group(program_of: Program, tmp_path: Path) -> None:
    well(ran(tmp_path, program_of("cmake", 2)), "rank 0 of 2 has saved", "rank 1 of 2 has saved")
    saved = (tmp_path / "w.safetensors").read_bytes()
    assert struct.unpack("<4f", saved[8 + int.from_bytes(saved[:8], "little") :]) == (0.0, 0.0, 1.0, 2.0)
