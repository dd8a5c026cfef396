"""Sentences that users read where the driver, the device or NVRTC does not serve.

Each case is a fake of tests/cuda, in a new process, and an Average of weights that lie on the device.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAKES = Path(__file__).parents[2] / "build/release/fake"
PROGRAM = """
import numpy
import shardow
from shardow import _core

memory = numpy.ones((2, 5), numpy.float32)
weight, average = (_core.TensorView("p", "F32", _core.Region.whole([5]), m.ctypes.data, "cuda", 0, 0) for m in memory)
options = _core.AverageOptions(
    schedules=[shardow.schedules.constant(0.5)], dtype="F32", rule=_core.Rule.lerp, rounding=_core.Rounding.nearest,
    non_finite=_core.NonFinite.hold, update_every=1, start_step=0, seed=0, num_threads=1,
)
try:
    _core.Average([weight], [[average]], options).update()
    print("averages, with", _core.cuda_compiler())
except Exception as error:
    print(type(error).__name__, _core.cuda_available(), error)
"""


def printed(folder: Path, program: str = PROGRAM, **variables: str) -> str:
    """Returns what a program prints with the libraries of that folder first on the loader's path."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), **variables}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


NO_DEVICE, NO_KERNELS = "UnsupportedError False no CUDA device answers: ", "UnsupportedError True "


@pytest.mark.parametrize(
    ("variables", "begins", "sentence"),
    [
        ({"FAKE_CUDA_VERSION": "11080"}, NO_DEVICE, "the NVIDIA driver is too old: update it to 525 or later"),
        ({"FAKE_CUDA_INIT": "100"}, NO_DEVICE, "no CUDA-capable device is detected (CUDA_ERROR_NO_DEVICE)"),
        ({"FAKE_CUDA_DEVICES": "0"}, NO_DEVICE, "none is installed, or CUDA_VISIBLE_DEVICES hides it"),
        # The device answers: saves, loads and averages on the host need no kernels.
        ({"FAKE_NVRTC_MAJOR": "11"}, NO_KERNELS, "this NVRTC is too old: 12.0 or later compiles the kernels (this one"),
        ({"FAKE_NVRTC_MAJOR": "13"}, NO_KERNELS, "the driver refuses what NVRTC 13.4 writes: update it, or use an"),
        ({"FAKE_CUDA_CAPABILITY": "70"}, NO_KERNELS, "NVRTC 12.4 no longer compiles for this device: use an older one"),
        ({"SHARDOW_NVRTC": "/nowhere/l.so"}, NO_KERNELS, "SHARDOW_NVRTC names no library that can be loaded: /nowhere"),
        ({"FAKE_NVRTC_STATUS": "6"}, "InternalError True ", "NVRTC 12.4 refuses the kernels: shardow.cu(1): error: as"),
        ({"FAKE_CUDA_CAPABILITY": "90"}, "averages, with ('NVRTC 12.4', 'Fake H100', ", ""),
        ({"FAKE_CUDA_CAPABILITY": "101"}, "averages, with ('NVRTC 12.4', 'Fake H100', ", ""),  # by PTX
    ],
)
def test_what_serves_and_what_does_not(variables: dict[str, str], begins: str, sentence: str) -> None:
    text = printed(FAKES, **variables)
    assert text.startswith(begins)
    assert sentence in text


def test_no_driver_and_no_nvrtc(tmp_path: Path) -> None:
    assert "this machine has no NVIDIA driver (libcuda.so.1: cannot open" in printed(tmp_path)
    (tmp_path / "libcuda.so.1").symlink_to(FAKES / "libcuda.so.1")
    text = printed(tmp_path)
    if text.startswith("averages"):
        pytest.skip("the loader finds an NVRTC of this machine")
    assert text.startswith("UnsupportedError True ")
    assert "was found: neither libnvrtc.so.12 nor an older one" in text
    assert "device 0 is Fake H100 of compute capability 9.0, its driver is of CUDA 12.4" in text


def test_a_real_nvrtc_compiles_what_the_fake_driver_runs() -> None:
    nvrtc = pytest.importorskip("nvidia.cuda_nvrtc", reason="no nvidia-cuda-nvrtc-cu12: tools/requirements.txt")
    path = next(Path(next(iter(nvrtc.__path__)), "lib").glob("libnvrtc.so.1?"))
    assert printed(FAKES, SHARDOW_NVRTC=str(path)).startswith("averages, with ('NVRTC 12.")


def test_cuda_is_asked_nothing_where_all_tensors_are_on_the_cpu(tmp_path: Path) -> None:
    program = f"""
import torch, shardow
from shardow.compat import torch_ema

weight, path = torch.nn.Parameter(torch.ones(3)), {str(tmp_path / "w.safetensors")!r}
for call in (
    lambda: shardow.save({{"w": weight}}, path),
    lambda: shardow.EMA(torch.nn.Linear(3, 3)).update(),
    lambda: torch_ema.ExponentialMovingAverage([weight], 0.9).update(),
):
    call()
    with open("/proc/self/maps") as maps:
        print("libcuda" in maps.read())
"""
    assert printed(FAKES, program).split() == ["False"] * 3
