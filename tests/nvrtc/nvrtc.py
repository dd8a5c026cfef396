"""NVRTC by ctypes: compiles the engine's kernels as src/kernels/cuda_kernels.cc does, but for any architecture, with
what the assembler says of registers and spills.

`python nvrtc.py LIBRARY ARCHITECTURE NAME...` prints JSON. A version of NVRTC is loaded once a process.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "build/release/generated/kernels/cuda_sources.h"


def sources() -> dict[str, str]:
    """Returns the text of each header that the engine gives NVRTC."""
    text = SOURCES.read_text()
    full = re.findall(r'\{"([^"]+)", R"source\((.*?)\)source"\}', text, re.DOTALL)
    return {**dict(full), **dict.fromkeys(re.findall(r'\{"([^"]+)", ""\}', text), "")}


def program() -> str:
    lines = SOURCES.read_text().split("kProgram =")[1].split(";\n\n")[0]
    return "".join(line.encode().decode("unicode_escape") for line in re.findall(r'"((?:[^"\\]|\\.)*)"', lines))


def open_library(path: Path) -> ctypes.CDLL:
    for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(path))


def compile_kernels(path: Path, architecture: int, names: list[str]) -> tuple[bytes, str, list[str]]:
    """Returns the cubin, the log and the mangled names."""
    library = open_library(path)
    headers = sources()
    handle = ctypes.c_void_p()

    def call(function: str, *arguments: object) -> int:
        return int(getattr(library, function)(*arguments))

    def text(kind: str) -> bytes:
        size = ctypes.c_size_t()
        assert call(f"nvrtcGet{kind}Size", handle, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert call(f"nvrtcGet{kind}", handle, buffer) == 0
        return buffer.raw

    array = ctypes.c_char_p * len(headers)
    made = call(
        "nvrtcCreateProgram", ctypes.byref(handle), program().encode(), b"shardow.cu", len(headers),
        array(*(header.encode() for header in headers.values())), array(*(name.encode() for name in headers)),
    )  # fmt: skip
    assert made == 0
    for name in names:
        assert call("nvrtcAddNameExpression", handle, name.encode()) == 0
    options = ["--std=c++20", f"--gpu-architecture=sm_{architecture}", "--fmad=false", "-default-device"]
    options += ["--diag-suppress=161", "--ptxas-options=-v"]
    status = call(
        "nvrtcCompileProgram", handle, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options))
    )
    log = text("ProgramLog").rstrip(b"\0").decode()
    assert status == 0, log
    lowered = []
    for name in names:
        mangled = ctypes.c_char_p()
        assert call("nvrtcGetLoweredName", handle, name.encode(), ctypes.byref(mangled)) == 0
        lowered.append((mangled.value or b"").decode())
    return text("CUBIN"), log, lowered


if __name__ == "__main__":
    cubin, log, lowered = compile_kernels(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4:])
    Path(sys.argv[3]).write_bytes(cubin)
    print(json.dumps({"bytes": len(cubin), "log": log, "names": lowered}))
