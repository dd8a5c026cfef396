"""The command as the build made it, and files for it to work on."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import shardow

ROOT = Path(__file__).parents[2]
COMMAND = ROOT / "build" / "release" / "shardow"


def run(*words: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(COMMAND), *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        env={**os.environ, **environment},
    )


def told(*words: object, status: int = 0, cwd: Path | None = None) -> str:
    """What it prints, when it ends with this status."""
    done = run(*words, cwd=cwd)
    assert done.returncode == status, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def told_json(*words: object, status: int = 0) -> Any:
    return json.loads(told(*words, "--json", status=status))


def tensors(
    seed: int = 0, sizes: tuple[int, ...] = (7, 4096, 300_000), dtype: str = "float32"
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"layer.{i}.weight": rng.standard_normal(size).astype(dtype) for i, size in enumerate(sizes)}


def foreign(path: Path, values: Mapping[str, np.ndarray]) -> Path:
    """As safetensors' own writer has it, without checksums."""
    save_file(dict(values), path)
    return path


def ours(path: Path, values: Mapping[str, np.ndarray], **options: Any) -> Path:
    import torch

    shardow.save({name: torch.from_numpy(value) for name, value in values.items()}, path, **options)
    return path


def sparse(path: Path, size: int, dtype: str = "U8", checksum: bool = True) -> Path:
    """A tensor "a" of zeros in so many bytes, which lie nowhere; its checksum is wrong, or missing."""
    entry = {"dtype": dtype, "shape": [size // (2 if dtype == "BF16" else 1)], "data_offsets": [0, size]}
    metadata = {"shardow.crc32": '{"a":"00000001"}'} if checksum else {}
    header = json.dumps({"__metadata__": metadata, "a": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + size)
    return path


def flip(path: Path, at: int) -> None:
    """One bit of one byte, counted from the end where negative."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def wait_until_it_waits(process: subprocess.Popen[Any], where: str) -> None:
    """In this function of the kernel."""
    for _ in range(1500):
        if where in Path(f"/proc/{process.pid}/wchan").read_text():
            return
        assert process.poll() is None, f"it ended with {process.returncode}"
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"it does not wait in {where}, but in {Path(f'/proc/{process.pid}/wchan').read_text()}")
