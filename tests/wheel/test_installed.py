"""What `make wheel` made, installed where nothing of this machine is: `make wheel-test`, `make test-all`; it takes
minutes, and root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
WHEELS = sorted((ROOT / "dist").glob("*.whl"))

pytestmark = pytest.mark.skipif(not os.environ.get("SHARDOW_ALL"), reason="chroots take minutes: make wheel wheel-test")


def wheel_of(tag: str, machine: str = "x86_64") -> Path:
    wheels = [wheel for wheel in WHEELS if f"-{tag}-manylinux" in wheel.name and machine in wheel.name]
    assert wheels, f"dist/ has no wheel for {tag}: make wheel"
    return wheels[0]


def test_every_wheel_holds_to_the_rules() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools/wheel/check.py", *WHEELS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("suite", "tag", "torch"),
    [("bookworm", "cp311-cp311", True), ("trixie", "cp312-abi3", False)],
)
def test_a_wheel_in_a_bare_debian(suite: str, tag: str, torch: bool) -> None:
    """The README's first example where torch's CPU build is to be had for that Debian's Python; what needs no torch
    everywhere.
    """
    run = [ROOT / "tools/wheel/bare", suite, wheel_of(tag), HERE / "inside.py", ROOT / "README.md"]
    done = subprocess.run([str(part) for part in run], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    assert report["torch"] is torch
    assert report["module"].endswith(".abi3.so" if "abi3" in tag else ".so")
    assert report["command"] == f"shardow {wheel_of(tag).name.split('-')[1]}"
    assert (report["compilers"], report["libraries"], report["devices"]) == ([], [], [])
    assert report["import_seconds"] < 0.05


@pytest.mark.parametrize("nvrtc", ["nvidia-cuda-nvrtc-cu12==12.4.127", "nvidia-cuda-nvrtc==13.0.88"])
def test_kernels_of_a_wheel_are_compiled_by_the_nvrtc_beside_it_and_compute_the_bits_of_the_cpu(
    nvrtc: str, tmp_path: Path
) -> None:
    """The fake driver is first on the loader's path, and has the kernels' twins."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path]
    subprocess.run([*pip, wheel_of("cp311-cp311"), nvrtc], check=True)
    (library,) = tmp_path.glob("nvidia/*/lib/libnvrtc.so.1?")
    major, minor = nvrtc.split("==")[1].split(".")[:2]
    variables = {"FAKE_CUDA_VERSION": f"{major}0{minor}0", "SHARDOW_NVRTC": str(library)}
    folders = [tmp_path, sysconfig.get_path("purelib")]  # without what installs this checkout there
    done = subprocess.run(
        [sys.executable, "-S", HERE / "on_device.py", *folders],
        env={**os.environ, "LD_LIBRARY_PATH": str(ROOT / "build/release/fake"), **variables},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["NVRTC", f"{major}.{minor}", "Fake", "H100"]


@pytest.mark.timeout(600)
def test_an_arm_wheel_under_emulation() -> None:
    """The Python that it was built for, with NumPy, reads a file; how long an import takes says nothing there."""
    if not any("aarch64" in wheel.name for wheel in WHEELS):
        pytest.skip('dist/ has no ARM wheel: make wheel WHEELS="x86_64 aarch64"')
    folder = ROOT / "build/wheel/aarch64"
    site = folder / "site"
    wheel = wheel_of("cp312-abi3", "aarch64")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--target", site]
    platforms = [f"--platform=manylinux{one}_aarch64" for one in ("_2_28", "_2_27", "_2_17", "2014")]
    subprocess.run([*pip, "--only-binary=:all:", "--python-version=3.13", *platforms, wheel], check=True)
    run = [folder / "python3.13/usr/bin/run-python", HERE / "inside.py"]
    done = subprocess.run(run, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(site)})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["machine"] == "aarch64"


def test_the_source_distribution_is_what_git_has() -> None:
    """All of it, so that it builds and its tests run; and nothing that was built."""
    (archive,) = (ROOT / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        held = {name.split("/", 1)[1] for name in opened.getnames() if "/" in name} - {"PKG-INFO"}
    tracked = set(
        subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    )
    assert held == tracked
