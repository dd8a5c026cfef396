"""Translates torch's dtypes into their names in files and in the engine, and back, and reads the devices and dtypes
that users name."""

from __future__ import annotations

from typing import Any

import torch

from shardow.base.checks import invalid, unsupported

NAMES = {
    torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16", torch.complex64: "C64",
    torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
#: Names of torch's packed dtypes, and how many of the format's elements one element of torch's holds.
PACKED = {"F4": 2}
for attribute, name in (("float8_e8m0fnu", "F8_E8M0"), ("float4_e2m1fn_x2", "F4")):  # torch 2.6 lacks these
    if hasattr(torch, attribute):
        NAMES[getattr(torch, attribute)] = name


def name_of(what: str, dtype: torch.dtype) -> str:
    """Returns a dtype's name in files. Raises NotImplementedError where it has none; ``what`` is for the message."""
    if dtype not in NAMES:
        raise unsupported(f"'{what}' is {dtype}, which safetensors files do not have")
    return NAMES[dtype]


def dtype_of(what: str, name: str) -> torch.dtype:
    """Returns torch's dtype of a name in files. Raises NotImplementedError where torch has none."""
    dtype = next((candidate for candidate, known in NAMES.items() if known == name), None)
    if dtype is None:
        raise unsupported(f"'{what}' is {name}, which torch does not have")
    return dtype


def device_of(device: Any) -> torch.device:
    """Returns a user's ``device=`` as torch's. Raises ValueError where it is no device."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise invalid(f"device={device!r}; give a device of torch's, e.g. torch.device('cpu') or 'cuda:1'") from None


def floating(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Returns a user's ``dtype=`` as torch's. Raises ValueError where it is no floating dtype of files."""
    if dtype is None:
        return None
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(chosen, torch.dtype) or chosen not in NAMES or not chosen.is_floating_point:
        raise invalid(f"dtype={dtype!r}; give a floating dtype, e.g. torch.bfloat16 or 'bfloat16'")
    return chosen
