"""shardow/libtorch.h and the programs over it (examples/libtorch, examples/cpp on processes), against the installed
package and the LibTorch that torch brings.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from built import CMAKE, ROOT, contents, install, named, run, succeed
from sketches import program_of

torch = pytest.importorskip("torch", reason="no LibTorch, so shardow/libtorch.h is not tried: pip install torch")

from safetensors.torch import load_file  # noqa: E402
from torch.utils.cpp_extension import include_paths  # noqa: E402

import shardow  # noqa: E402

HERE = Path(__file__).parent
ALL = bool(os.environ.get("SHARDOW_ALL"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory)


@pytest.fixture(scope="module")
def built(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the programs. They are compiled side by side: torch's headers take half a minute each."""
    if not ALL:
        pytest.skip("torch's headers are compiled by make test-slow, which CI runs")
    build = tmp_path_factory.mktemp("build")
    sources = {"tests": HERE, "trainer": ROOT / "examples" / "cpp", "example": ROOT / "examples" / "libtorch"}
    where = f"-DCMAKE_PREFIX_PATH={installed};{torch.utils.cmake_prefix_path}"
    for name, source in sources.items():
        options = [where, f"-DDIGITS_PYTHON={sys.executable}", "-DCMAKE_UNITY_BUILD=ON"]
        succeed(CMAKE, "-S", source, "-B", build / name, *options)
    compilers = [
        subprocess.Popen([CMAKE, "--build", build / name], stdout=subprocess.PIPE, text=True) for name in sources
    ]
    for one in compilers:
        said, _ = one.communicate()
        assert one.returncode == 0, said
    return build


@pytest.fixture(scope="module")
def straight(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the example leaves when nothing stops it."""
    out = tmp_path_factory.mktemp("straight")
    accuracies = json.loads(train(built, out, 200))
    assert accuracies.keys() == {"weights", "warmup(decay=0.95)", "0.8"}
    assert min(accuracies.values()) > 0.8, accuracies
    assert len(set(accuracies.values())) > 1, accuracies
    return out


def train(built: Path, out: Path, steps: int) -> str:
    return succeed("env", "OMP_NUM_THREADS=1", built / "example" / "train", out, steps)


def all_of(out: Path) -> dict[str, bytes]:
    return {"the export": (out / "model.safetensors").read_bytes(), **contents(out / "checkpoint")}


def test_views_and_groups_and_both_libraries_in_one_program(built: Path) -> None:
    said = succeed("env", "OMP_NUM_THREADS=2", built / "tests" / "libtorch_test")
    assert "PASSED" in said
    needed = succeed("readelf", "-d", built / "tests" / "libtorch_test")
    assert "libshardow.so.0" in needed
    assert "libtorch_cpu.so" in needed


@pytest.mark.skipif(not ALL, reason="the programs compile the header: make test-slow")
def test_the_header_s_sketch_compiles_with_clang_where_it_is_there(installed: Path, tmp_path: Path) -> None:
    header = installed / "include" / "shardow" / "libtorch.h"
    sketch = program_of(header, more=", std::shared_ptr<torch::nn::Module> model, Steps& optimizer")
    (tmp_path / "sketch.cc").write_text(f"#include <shardow/{header.name}>\nstruct Steps {{ void step(); }};\n{sketch}")
    compiler = shutil.which("clang++-14") or shutil.which("clang++") or "g++"
    warnings = ["-std=c++20", "-Wall", "-Wextra", "-Wconversion", "-Wno-sign-conversion", "-Werror"]
    torch_s = [f"-isystem{path}" for path in include_paths()]
    succeed(compiler, *warnings, "-fsyntax-only", f"-I{installed / 'include'}", *torch_s, tmp_path / "sketch.cc")


def test_what_stopped_or_was_killed_goes_on_bit_for_bit(built: Path, straight: Path, tmp_path: Path) -> None:
    stopped, killed = tmp_path / "stopped", tmp_path / "killed"
    train(built, stopped, 70)
    train(built, stopped, 200)
    assert len(all_of(straight)) == 5
    assert all_of(stopped) == all_of(straight)
    killed.mkdir()
    running = subprocess.Popen(
        ["env", "OMP_NUM_THREADS=1", built / "example" / "train", killed, "200"], stdout=subprocess.DEVNULL
    )
    while not (killed / "checkpoint").exists():
        assert running.poll() is None
        time.sleep(0.002)
    running.kill()
    running.wait()
    assert not (killed / "model.safetensors").exists()
    train(built, killed, 200)
    assert all_of(killed) == all_of(straight)


def on_processes(built: Path, ranks: int, path: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    """examples/cpp as its README starts it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    program = built / "trainer" / "trainer_processes"
    return run(*torchrun, "--no-python", program, built / "trainer" / "digits.bin", path, *flags)


def test_the_trainer_on_processes_goes_on_after_a_kill_with_the_bits_of_threads(built: Path, tmp_path: Path) -> None:
    straight, path = tmp_path / "straight", tmp_path / "run"
    succeed(built / "trainer" / "trainer", built / "trainer" / "digits.bin", straight, "--ranks", 3)
    killed = on_processes(built, 2, path, "--die-while-saving", 100)
    assert killed.returncode != 0
    assert "a new start" in killed.stderr
    assert "SIGKILL" in killed.stdout + killed.stderr
    assert json.loads(shardow.open(path / "ema-0.9.safetensors").metadata["shardow.state"])["step"] == 50
    resumed = on_processes(built, 2, path)
    assert resumed.returncode == 0, resumed.stderr
    assert "a new start" not in resumed.stderr
    assert resumed.stdout.count("step 300 on 2 ranks: accuracy 0.") == 2, "one line for each decay"
    assert contents(path) == contents(straight)
    assert len(contents(path)) == 3


class Net(torch.nn.Module):
    """The example's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 16, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(16)
        self.head = torch.nn.Linear(16 * 4 * 4, 10)


def test_python_opens_the_export_and_goes_on_with_the_averages(straight: Path) -> None:
    net, loaded = Net(), Net()
    exported = load_file(straight / "model.safetensors")
    net.load_state_dict(exported, strict=True)
    assert net.norm.num_batches_tracked == 200
    shardow.load(loaded, straight / "model.safetensors")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in loaded.state_dict().items())
    ema = shardow.EMA(Net(), decay=[shardow.schedules.warmup(0.95), 0.8], buffers="ignore")
    ema.load(straight / "checkpoint")
    assert ema.stats()["step"] == 200
    averages = ema.full_state_dict(decay="warmup(decay=0.95)", complete=False)
    assert averages.keys() == dict(net.named_parameters()).keys()
    assert all(torch.equal(average, exported[name]) for name, average in averages.items())
    weights = load_file(named(straight / "checkpoint")["model.safetensors"])
    assert not any(torch.equal(average, weights[name]) for name, average in averages.items())


@pytest.mark.parametrize("first", ["torch", "shardow"])
def test_a_python_process_takes_all_three_in_any_order(first: str, installed: Path) -> None:
    """torch, the extension module and the shared library, the last with its symbols for all to see."""
    library = f"import ctypes; ctypes.CDLL({str(installed / 'lib' / 'libshardow.so')!r}, ctypes.RTLD_GLOBAL)"
    order = ["import torch", library, "import shardow"]
    work = "net = torch.nn.Linear(2048, 1024); ema = shardow.EMA(net, decay=0.5); before = net.weight.detach().clone()"
    step = (
        "net.weight.data.add_(1); ema.update(); assert torch.equal(ema.full_state_dict()['weight'], "
        "before.lerp(net.weight, 0.5))"
    )
    succeed(sys.executable, "-c", "\n".join([*(order if first == "torch" else order[::-1]), work, step]))


def test_without_libtorch_the_example_says_what_is_missing(installed: Path, tmp_path: Path) -> None:
    source = ROOT / "examples" / "libtorch"
    done = subprocess.run(
        [CMAKE, "-S", source, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={installed}"], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "LibTorch was not found. It comes with PyTorch (pip install torch)" in " ".join(done.stderr.split())
