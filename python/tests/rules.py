"""EMA's options for each rule by name, and for averages in float64: what tests of devices have in common."""

from __future__ import annotations

from typing import Any

import torch

RULES: dict[str, dict[str, Any]] = {
    "mul_add": {"decay": 0.99, "rule": "mul_add"},
    "two_products": {"decay": 0.99, "rule": "two_products"},
    "difference": {"decay": 0.99, "rule": "difference"},
    "fused_difference": {"decay": 0.99, "rule": "fused_difference"},
    "quotient": {"decay": 0.99, "rule": "quotient"},
    "float64": {"decay": 0.99, "dtype": torch.float64},
}
