"""What tools/wheel/check.py refuses, on modules that have each fault; and what holds for this build's own module
already.
"""

from __future__ import annotations

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


def test_a_module_without_fault(tmp_path: Path) -> None:
    assert check.module_faults(module(tmp_path)) == []


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
    (fault,) = check.module_faults(module(tmp_path, *options, source=source))
    assert fault.startswith(said)


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
        "more than 4,000,000",
        "has 0 modules",
        "lacks the command",
        "lacks the licences of cli11, eigen",
    ):
        assert fault in said


def test_this_builds_module_exports_its_entry_alone() -> None:
    assert check.exported(Path(shardow._core.__file__)) == {"PyInit__core"}


def test_no_wheel_is_no_success() -> None:
    assert check.main([]) == 1
