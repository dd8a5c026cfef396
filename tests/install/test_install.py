"""The installed C++ package: both libraries, through CMake and through pkg-config; its headers; what it exports."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from built import CMAKE, install, run, succeed
from sketches import REFERENCE, blocks_of, program_of, shown_of

HERE = Path(__file__).parent
ALL = bool(os.environ.get("SHARDOW_ALL"))
WARNINGS = ["-std=c++20", "-Wall", "-Wextra", "-Wconversion", "-Werror"]

NEED_MORE = {"libtorch.h"}  # a header over somebody else's: tests/libtorch compiles it


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory)


def public(installed: Path) -> list[Path]:
    """The headers that users read, by name."""
    return sorted((installed / "include" / "shardow").glob("*.h"))


def works(program: Path, tmp_path: Path) -> None:
    assert "/there/is/no.safetensors" in succeed(program, tmp_path / "ema.safetensors")


@pytest.mark.parametrize("component", ["shared", "static"])
def test_found_by_cmake(component: str, installed: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    succeed(CMAKE, "-S", HERE, "-B", build, f"-DCMAKE_PREFIX_PATH={installed}", f"-DCOMPONENT={component}")
    succeed(CMAKE, "--build", build)
    needed = succeed("readelf", "-d", build / "consumer")
    assert ("libshardow.so.0" in needed) == (component == "shared")
    works(build / "consumer", tmp_path)


@pytest.mark.parametrize("flags", [[], ["--static"]], ids=["shared", "static"])
def test_found_by_pkg_config(flags: Sequence[str], installed: Path, tmp_path: Path) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("no pkg-config: apt-get install pkg-config")
    told = succeed(
        "pkg-config", "--cflags", "--libs", *flags, "shardow", PKG_CONFIG_PATH=str(installed / "lib" / "pkgconfig")
    ).split()
    if flags:
        told = ["-l:libshardow.a" if word == "-lshardow" else word for word in told]
    program = tmp_path / "consumer"
    succeed("g++", *WARNINGS, HERE / "main.cc", "-o", program, *told, f"-Wl,-rpath,{installed / 'lib'}")
    works(program, tmp_path)


@pytest.mark.parametrize("compiler", ["g++", "clang++"] if ALL else ["g++"])
def test_every_header_compiles_alone_and_twice(compiler: str, installed: Path, tmp_path: Path) -> None:
    found = shutil.which(compiler) or shutil.which(f"{compiler}-14")
    if found is None:
        pytest.skip(f"no {compiler}: apt-get install {'clang-14' if 'clang' in compiler else compiler}")
    headers = [path.name for path in public(installed)]
    assert len(headers) <= 14
    assert {path.name for path in (installed / "include" / "shardow").iterdir()} == {*headers, "detail"}
    for header in sorted(set(headers) - NEED_MORE) if ALL else ["average.h", "checkpoint.h", "merge.h"]:
        source = tmp_path / "twice.cc"
        source.write_text(f"#include <shardow/{header}>\n" * 2)
        succeed(found, *WARNINGS, "-fsyntax-only", f"-I{installed / 'include'}", source)


def test_every_sketch_of_a_header_compiles(installed: Path, tmp_path: Path) -> None:
    headers = public(installed)
    assert [one.name for one in headers if blocks_of(one.read_text())] == ["average.h"], (
        "the others' are in docs/cpp_reference.md"
    )
    assert {one.name for one in headers if not shown_of(one.name)} == {"average.h", "error.h"}
    assert REFERENCE.read_text().count("```cpp\n") == sum(len(shown_of(one.name)) for one in headers), (
        "each below its header's name"
    )
    source = tmp_path / "sketches.cc"
    program = program_of(*(one for one in headers if one.name not in NEED_MORE))
    compiler = ["g++", *WARNINGS, "-fsyntax-only", f"-I{installed / 'include'}", source]
    source.write_text(program)
    succeed(*compiler)
    for call in ("ema.update(", "take("):
        assert call in program
        program = program.replace(call, call.replace("(", "_no_such_call("))
    source.write_text(program)
    told = run(*compiler).stderr
    for call in ("update_no_such_call", "take_no_such_call"):
        assert call in told, "and one that does not is found"


def test_all_headers_are_read_in_a_quarter_of_an_hour(installed: Path) -> None:
    """At 250 words of comments a minute and 350 of code, sketches included; what is rarer goes to
    docs/cpp_reference.md.
    """
    comments = code = 0
    for line in "\n".join(header.read_text() for header in public(installed)).splitlines():
        said = re.fullmatch(r'((?:[^"/]|"[^"]*"|/(?!/))*)(?://[/<]*(.*))?', line)
        assert said is not None, line
        words = len((said[2] or "").split())
        is_sketch = re.match("//   ", line) is not None
        code += len(said[1].split()) + words * is_sketch
        comments += words * (not is_sketch)
    assert 1_000 < comments <= 1_900
    assert 1_000 < code <= 2_600
    assert comments / 250 + code / 350 <= 15


def test_the_command_and_its_pages(installed: Path) -> None:
    assert succeed(installed / "bin" / "shardow", "--version").startswith("shardow ")
    assert ".SH VERBS" in (installed / "share/man/man1/shardow.1").read_text()
    for page in (
        "bash-completion/completions/shardow",
        "zsh/site-functions/_shardow",
        "fish/vendor_completions.d/shardow.fish",
    ):
        assert "shardow" in (installed / "share" / page).read_text()


def test_nothing_of_what_it_is_built_on_shows(installed: Path) -> None:
    library = installed / "lib" / "libshardow.so"
    names = succeed("nm", "-DC", "--defined-only", library)
    exported = [line.split(" ", 2)[2] for line in names.splitlines()]
    assert any(name.startswith("shardow::Average::update(") for name in exported)
    inner = re.compile(r"shardow::(base|tensor|kernels|average|group|file|ema)::[\w~]|::(Impl|Plan)::")
    assert [
        name for name in exported if "shardow::" not in name or inner.match(name) or inner.search(name.split("(")[0])
    ] == []
    headers = [path for path in (installed / "include").rglob("*.h") if path.name not in NEED_MORE]
    text = "".join(path.read_text() for path in headers)
    ours = [name for name in exported if name.startswith("shardow::") and "operator" not in name]
    named = {name.split("(")[0].split("[abi")[0] for name in ours}
    assert [
        name for name in sorted(named) if not re.search(rf"\b{re.escape(name.split('::')[-1].lstrip('~'))}\b", text)
    ] == []
    assert re.findall(r"#include [<\"](?!shardow/)[\w/]+\.h|(?:fmt|simdjson|hwy)::", text) == []
    assert "SONAME" in succeed("readelf", "-d", library)
