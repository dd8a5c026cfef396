"""What tools/wheel/check.py refuses, on modules that have each fault; and what holds for this build's own module
already.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import shardow

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools/wheel"))
import check  # noqa: E402


def module(tmp_path: Path, *options: str, source: str = "") -> Path:
    """A shared library that exports what the wheel's module exports, and what `source` adds."""
    (tmp_path / "module.c").write_text(f"void PyInit__core(void) {{}}\n{source}")
    built = tmp_path / "module.so"
    subprocess.run(["gcc", "-shared", "-fPIC", *options, "-o", built, tmp_path / "module.c"], check=True)
    return built


def fat_binary(*entries: tuple[int, int]) -> str:
    """C for a section of CUDA code: a header, and an entry of 64 bytes for each (kind, architecture), kind 2 code and 1
    PTX.
    """
    body = b"".join(
        struct.pack("<HHIQIIHHI", kind, 257, 64, 0, 0, 0, 1, 1, number).ljust(64, b"\0") for kind, number in entries
    )
    whole = b"\x50\xed\x55\xba" + struct.pack("<HHQ", 1, 16, len(body)) + body
    values = ",".join(map(str, whole))
    return f'__attribute__((section(".nv_fatbin"), used)) static const unsigned char fat[] = {{{values}}};'


ALL_CODE = [(2, one) for one in sorted(check.CODE)] + [(1, one) for one in sorted(check.PTX)]


def test_a_module_without_fault(tmp_path: Path) -> None:
    assert check.module_faults(module(tmp_path, source=fat_binary(*ALL_CODE)), cuda=True) == []


@pytest.mark.parametrize(
    ("options", "source", "said"),
    [
        (["-Wl,--no-as-needed", "-lz"], "", "needs libz.so.1"),
        ([], "void another(void) {}", "exports 1 symbols besides PyInit__core, another among them"),
        (
            [],
            "int not_there(void); static int (*use)(void) __attribute__((used)) = not_there;",
            "leaves not_there to be found by chance",
        ),
        (["-Wl,-rpath,/home/somebody/lib"], "", "has a path of the machine that built it"),
    ],
)
def test_a_module_with_a_fault(tmp_path: Path, options: list[str], source: str, said: str) -> None:
    (fault,) = check.module_faults(module(tmp_path, *options, source=source), cuda=False)
    assert fault.startswith(said)


@pytest.mark.parametrize("entries", [[], ALL_CODE[1:], ALL_CODE[:-1]])
def test_an_architecture_that_is_missing(tmp_path: Path, entries: list[tuple[int, int]]) -> None:
    built = module(tmp_path, source=fat_binary(*entries) if entries else "")
    (fault,) = check.module_faults(built, cuda=True)
    assert fault.startswith("has CUDA code for ")
    assert check.module_faults(built, cuda=False) == []


@pytest.mark.skipif(
    not Path(sys.executable).with_name("auditwheel").exists(),
    reason="no auditwheel: pip install -r tools/requirements-wheel.txt, as make wheel does",
)
def test_a_wheel_that_says_what_it_is_not(tmp_path: Path) -> None:
    """Too large, without licences, without a module and without the command."""
    import zipfile

    wheel = tmp_path / "shardow-0.1.0-cp312-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr("shardow/large.bin", bytes(check.MOST_BYTES))
    said = " / ".join(check.wheel_faults(wheel, Path(sys.executable).parent))
    for fault in (
        "more than 8,000,000",
        "has 0 modules",
        "lacks the command",
        "lacks the licences of cli11, cuda, eigen",
    ):
        assert fault in said


def test_this_builds_module_exports_its_entry_alone() -> None:
    assert check.exported(Path(shardow._core.__file__)) == {"PyInit__core"}


def test_this_builds_module_has_code_for_every_card() -> None:
    """That it was built for, where it was built with CUDA."""
    cache = ROOT / "build/release/CMakeCache.txt"
    asked = re.search(
        r"^CMAKE_CUDA_ARCHITECTURES:\w+=(\d+)-real$", cache.read_text() if cache.exists() else "", re.MULTILINE
    )
    expected = ({int(asked[1])}, set()) if asked else (check.CODE, check.PTX)
    assert check.kernels(Path(shardow._core.__file__)) in ((set(), set()), expected)


def test_no_wheel_is_no_success() -> None:
    assert check.main([]) == 1
