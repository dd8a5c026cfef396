"""Run by the Python of a bare Debian, inside it, after `pip install` of a wheel: what a user would do first. Says what
it saw, as JSON.
"""

import glob
import importlib.util
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "nvcc", "cmake")
OURS = ("fmt", "hwy", "simdjson", "isal", "cudart", "cuda", "nvrtc")  # what a module built from source would ask for
IMPORT = "import time; began = time.perf_counter(); import shardow; print(time.perf_counter() - began)"


def import_seconds() -> float:
    """Of a new process, the median of seven, once its files are in memory: `import shardow`, without the interpreter's
    own start.
    """
    return statistics.median(float(subprocess.check_output([sys.executable, "-c", IMPORT])) for _ in range(7))


def without_torch() -> None:
    """A file written by the rules of safetensors, read by the engine; an error of the engine's that crosses into
    Python.
    """
    import numpy

    import shardow

    values = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
        with shardow.open(str(path), framework="numpy") as opened:
            assert (opened["weight"] == values).all()
        path.write_bytes(path.read_bytes()[:-4])
        try:
            shardow.open(str(path), framework="numpy")
        except shardow.Error as error:
            assert "model.safetensors" in str(error), error
        else:
            raise AssertionError("a file that was cut off was opened")
    schedule = shardow.schedules.inverse_gamma()
    assert shardow.Schedule.from_json(schedule.to_json()).to_json() == schedule.to_json()


def first_example(readme: str) -> None:
    """The README's first block, as torchrun would start it on one rank."""
    code = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert code
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    exec(compile(code[1], "README.md", "exec"), {})
    assert Path("run/ema.safetensors").exists()


if __name__ == "__main__":
    import shardow

    without_torch()
    torch = importlib.util.find_spec("torch") is not None
    if torch:
        first_example(Path(sys.argv[1]).read_text())
    report = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "glibc": platform.libc_ver()[1],
        "torch": torch,
        "import_seconds": import_seconds(),
        "module": Path(shardow._core.__file__).name,
        "command": subprocess.check_output([Path(sys.executable).parent / "shardow", "--version"], text=True).strip(),
        "compilers": [one for one in COMPILERS if shutil.which(one)],
        "libraries": [one for name in OURS for one in glob.glob(f"/usr/lib/**/lib{name}.so*", recursive=True)],
        "devices": glob.glob("/dev/nvidia*"),
    }
    print(json.dumps(report))
