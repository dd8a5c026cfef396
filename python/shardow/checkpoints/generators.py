"""The random generators of this rank, as bytes: Python's, numpy's where it is imported, torch's on the CPU and on CUDA
devices.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

from shardow.base import plain


def states() -> bytes:
    """JSON, which plain.decode() reads."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": _bytes(torch.get_rng_state())}
    if (numpy := sys.modules.get("numpy")) is not None:
        state = numpy.random.get_state(legacy=False)
        if state["bit_generator"] == "MT19937":
            found["numpy"] = {
                **state,
                "state": {"key": state["state"]["key"].tolist(), "pos": int(state["state"]["pos"])},
            }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = [_bytes(one) for one in torch.cuda.get_rng_state_all()]
    return json.dumps(plain.encode(found, "random generators"), separators=(",", ":")).encode()


def give(states: bytes) -> None:
    """As they were. What was not there then, or is not here now, stays as it is."""
    found = plain.decode(json.loads(states))
    random.setstate(found["python"])
    torch.set_rng_state(_tensor(found["torch"]))
    if "numpy" in found and (numpy := sys.modules.get("numpy")) is not None:
        state = found["numpy"]
        numpy.random.set_state(
            {**state, "state": {**state["state"], "key": numpy.array(state["state"]["key"], dtype=numpy.uint32)}}
        )
    if torch.cuda.is_available():
        for device, one in zip(range(torch.cuda.device_count()), found.get("cuda", ()), strict=False):
            torch.cuda.set_rng_state(_tensor(one), device)


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(state.tolist())


def _tensor(state: bytes) -> torch.Tensor:
    return torch.tensor(list(state), dtype=torch.uint8, device="cpu")
