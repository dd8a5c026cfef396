"""The kernels compiled by each NVRTC that PyTorch's wheels bring, for each generation of devices: no device is needed.

tools/requirements.txt has one of them. SHARDOW_ALL=1 installs the others into build/nvrtc; else these are skipped by
name. `python tests/nvrtc/test_nvrtc.py` prints the table of docs/performance.md.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "12.4": "nvidia-cuda-nvrtc-cu12==12.4.127",
    "12.8": "nvidia-cuda-nvrtc-cu12==12.8.93",
    "12.9": "nvidia-cuda-nvrtc-cu12==12.9.86",
    "13.0": "nvidia-cuda-nvrtc==13.0.88",
}
DISASSEMBLER = "nvidia-cuda-nvdisasm==13.5.37"
LATEST = {"12.4": 90}  # generations that came later
ARCHITECTURES = [75, 80, 90, 100, 120] if os.environ.get("SHARDOW_ALL") else [80]
KERNELS = [
    "update_kernel<float, float>",
    "update_kernel<float, BF16>",
    "update_kernel<float, F16>",
    "update_kernel<float, BF16, float>",
    "update_kernel<BF16, BF16>",
    "update_kernel<F16, F16>",
    "update_kernel<double, double>",
    "copy_kernel<float, BF16>",
    "swap_kernel",
    "cast_kernel<float, BF16>",
    "cast_kernel<BF16, float>",
]
#: Bytes of a thread's stack: some assemblers keep two registers of the whole tile there.
MOST_STACK = 8
PAIRS = [(version, each) for version in PACKAGES for each in ARCHITECTURES if each <= LATEST.get(version, 999)]


def in_packages(pattern: str, requirement: str, folder: Path) -> Path | None:
    """Returns the file of that package: of this environment, where it is of that version, or in `folder`."""
    name, version = requirement.split("==")
    folders = [folder]
    with contextlib.suppress(metadata.PackageNotFoundError):
        if metadata.version(name) == version:
            folders.append(Path(sysconfig.get_path("purelib")))
    return next((path for each in folders for path in each.glob(pattern)), None)


def library(version: str) -> Path | None:
    requirement = PACKAGES[version]
    folder = ROOT / "build/nvrtc" / requirement.split("==")[1]
    pattern = f"nvidia/*/lib/libnvrtc.so.{version.split('.')[0]}"
    if os.environ.get("SHARDOW_ALL") and in_packages(pattern, requirement, folder) is None:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, requirement]
        subprocess.run([str(part) for part in pip], check=False)  # skipped by name where it is not to be had
    return in_packages(pattern, requirement, folder)


@functools.cache
def compiled(version: str, architecture: int) -> dict[str, Any]:
    path = library(version)
    if path is None:
        pytest.skip(
            f"no NVRTC {version}: pip install --target build/nvrtc/... {PACKAGES[version]} (SHARDOW_ALL=1 does)"
        )
    with tempfile.NamedTemporaryFile() as cubin:
        command = [sys.executable, Path(__file__).with_name("nvrtc.py"), path, architecture, cubin.name, *KERNELS]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return {**json.loads(done.stdout), "cubin": Path(cubin.name).read_bytes()}


def registers_and_stacks(made: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns (registers, bytes of stack) of each kernel."""
    pattern = r"entry function '(\S+)' for.*?(\d+) bytes stack frame.*?Used (\d+) registers"
    rows = {row[1]: (int(row[3]), int(row[2])) for row in re.finditer(pattern, made["log"], re.DOTALL)}
    return {kernel: rows[name] for kernel, name in zip(KERNELS, made["names"], strict=True)}


@pytest.mark.parametrize(("version", "architecture"), PAIRS)
def test_kernels_compile_without_warning_and_keep_to_registers(version: str, architecture: int) -> None:
    made = compiled(version, architecture)
    assert "warning" not in made["log"], made["log"]
    assert made["cubin"].startswith(b"\x7fELF")
    stacks = {kernel: stack for kernel, (_, stack) in registers_and_stacks(made).items()}
    assert {kernel: stack for kernel, stack in stacks.items() if stack > MOST_STACK} == {}


@functools.cache
def disassembled(version: str, architecture: int) -> dict[str, str]:
    """Returns each kernel's text."""
    made = compiled(version, architecture)
    nvdisasm = in_packages("nvidia/*/bin/nvdisasm", DISASSEMBLER, ROOT / "build/nvrtc/nvdisasm")
    if nvdisasm is None:
        pytest.skip(f"no nvdisasm: pip install {DISASSEMBLER}")
    with tempfile.NamedTemporaryFile() as cubin:
        Path(cubin.name).write_bytes(made["cubin"])
        text = subprocess.run([nvdisasm, "-c", cubin.name], capture_output=True, text=True, check=True).stdout
    sections = re.split(r"^\.text\.(\S+):$", text, flags=re.MULTILINE)
    bodies = dict(zip(sections[1::2], sections[2::2], strict=True))
    return {kernel: bodies[name] for kernel, name in zip(KERNELS, made["names"], strict=True)}


@pytest.mark.parametrize(("version", "architecture"), PAIRS)
def test_averages_move_in_16_bytes_and_nothing_is_contracted(version: str, architecture: int) -> None:
    """The float32 update multiplies, adds and fuses as its source says: a fused operation for each of the lerps, and
    none more where multiplication and addition stand apart, in kMulAdd's `e * decay` and kTwoProducts.
    """
    text = disassembled(version, architecture)["update_kernel<float, float>"]
    update = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z][\w.]*)", text, re.MULTILINE)
    assert any(name.startswith("LDG") and "128" in name for name in update)
    assert any(name.startswith("STG") and "128" in name for name in update)
    # Eight elements: kMulAdd's e * decay, kTwoProducts' two products, kDifference's w * (e - p).
    assert sum(name.startswith("FMUL") for name in update) >= 32


#: Where a kernel's arguments begin in the constants, from that architecture on.
ARGUMENTS = {75: 0x160, 90: 0x210, 100: 0x380}
SIZE_OF_ARGUMENTS = 248  # sizeof(UpdateArguments)


@pytest.mark.parametrize(("version", "architecture"), PAIRS)
def test_a_replayed_update_reads_none_of_the_arguments_it_was_captured_with(version: str, architecture: int) -> None:
    """Whole words are chosen, each lane's own, between those arguments and what the graph keeps. These compilers have
    read a pointer from the arguments where it was chosen by address: every replay failed, on every device."""
    begin = next(ARGUMENTS[least] for least in sorted(ARGUMENTS, reverse=True) if architecture >= least)
    texts = disassembled(version, architecture)
    for kernel in (kernel for kernel in KERNELS if kernel.startswith("update_kernel")):
        constants = re.findall(r"c\[0x0\]\[(?:0x([0-9a-f]+)|U?R\d+\+0x([0-9a-f]+))\]", texts[kernel])
        fixed = {int(offset, 16) for offset, _ in constants if offset}
        assert {hex(each) for each in fixed if begin <= each < begin + SIZE_OF_ARGUMENTS} == set(), kernel
        assert f"{begin:x}" in {offset for _, offset in constants}, kernel


def table() -> str:
    lines = ["| NVRTC | " + " | ".join(f"sm_{each}" for each in ARCHITECTURES) + " |"]
    lines.append("|---" * (len(ARCHITECTURES) + 1) + "|")
    for version in PACKAGES:
        cells = []
        for each in ARCHITECTURES:
            if (version, each) not in PAIRS or library(version) is None:
                cells.append("")
                continue
            made = compiled(version, each)
            rows = registers_and_stacks(made)
            registers, stack = rows["update_kernel<float, BF16>"]
            worst = max(stack for _, stack in rows.values())
            cells.append(f"{registers}, {stack} ({worst}); {len(made['cubin']) / 1024:.0f} KiB")
        lines.append(f"| {version} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
