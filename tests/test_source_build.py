"""What a build from source says and decides before it compiles anything."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CMAKE = Path(sys.executable).parent / "cmake"


def configure(build: Path, *options: str, path: str = "/usr/bin:/bin") -> str:
    told = subprocess.run(
        [CMAKE, "-S", ROOT, "-B", build, "-G", "Ninja", *options],
        capture_output=True,
        text=True,
        env={"PATH": f"{CMAKE.parent}:{path}"},
    )
    return " ".join((told.stdout + told.stderr).split())


def test_all_missing_libraries_are_named_by_their_packages(tmp_path: Path) -> None:
    hidden = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("hwy", "fmt")]
    assert "apt-get install libhwy-dev libfmt-dev" in configure(tmp_path, "-DSHARDOW_TESTS=OFF", *hidden)


def test_without_a_compiler_all_packages_are_named(tmp_path: Path) -> None:
    """Without one nothing can be looked for, so none is known to be there."""
    told = configure(tmp_path, "-DSHARDOW_TESTS=OFF", path="")
    named = set(told.split("apt-get install ")[1].split(" CMake")[0].split(" Call")[0].split())
    of_libraries = set(
        re.findall(
            r"\w+:(lib\S+-dev|zlib1g-dev)|APPEND missing (\S+-dev)", (ROOT / "cmake/dependencies.cmake").read_text()
        )
    )
    assert {"g++", "python3-dev", *(one or other for one, other in of_libraries)} <= named


@pytest.mark.parametrize(("wanted", "left_out"), [("AUTO", True), ("ON", False)])
def test_the_library_of_the_command_is_named_and_may_be_missing(wanted: str, left_out: bool, tmp_path: Path) -> None:
    hidden = "-DCMAKE_DISABLE_FIND_PACKAGE_CLI11=ON"
    told = configure(tmp_path, "-DSHARDOW_TESTS=OFF", f"-DSHARDOW_COMMAND={wanted}", hidden)
    assert "apt-get install libcli11-dev" in told
    assert ("The command shardow is left out" in told, "Generating done" in told) == (left_out, left_out)


def test_missing_headers_of_python_are_named(tmp_path: Path) -> None:
    hidden = ["-DCMAKE_DISABLE_FIND_PACKAGE_Python=ON", "-DSHARDOW_PYTHON=ON"]
    told = configure(tmp_path, "-DSHARDOW_TESTS=OFF", *hidden)
    assert "headers of Python" in told
    assert "apt-get install python3-dev" in told


def compiled(build: Path) -> dict[str, str]:
    """Returns how each object of the extension and the command is compiled, and from what."""
    kept = re.compile(r"/(shardow_objects|shardow_cli|shardow_command|_core|nanobind-static)\.dir/")
    commands = json.loads((build / "compile_commands.json").read_text())
    return {
        row["output"]: row["command"] + (Path(row["file"]).read_text() if "/Unity/" in row["file"] else "")
        for row in commands
        if kept.search(row["output"])
    }


def test_the_tests_compile_nothing_of_the_extension_and_the_command_again(tmp_path: Path) -> None:
    common = ("-DSHARDOW_PYTHON=ON", f"-DPython_EXECUTABLE={sys.executable}")
    configure(tmp_path, "-DSHARDOW_TESTS=OFF", *common)
    before = compiled(tmp_path)
    assert len(before) > 20
    configure(tmp_path, "-DSHARDOW_TESTS=ON", "-DSHARDOW_BENCHMARKS=ON")
    assert compiled(tmp_path) == before


def test_pip_installs_this_project_and_what_files_list() -> None:
    """A bare word among pip's arguments would be the name of a package of somebody's."""
    told = subprocess.run(
        ["make", "-n", "-B", "build/.installed", "build/.test-setup"], cwd=ROOT, capture_output=True, text=True
    )
    commands = re.findall(r"/pip install (.*)", told.stdout.replace("\\\n", " "))
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(command)
        pairs = zip(["", *words], words, strict=False)
        named = [word for before, word in pairs if word[0] != "-" and before not in ("-e", "-r")]
        assert named == [], command
