"""Usage: bytes on one rank by what takes them, planned or measured, with the same keys either way."""

from __future__ import annotations

from typing import Any

KEYS = ("weights", "gradients", "optimizer", "averages", "activations")


class Usage(dict[str, Any]):
    """Bytes on one rank; printed as a table in MiB.

    weights: parameters and buffers; gradients; optimizer: its state; averages; activations: what autograd keeps at the
    end of a forward pass in training, or None where there was no batch to tell; total: the sum of those that are known.

    plan() adds saves: {switch: bytes of activations that it takes away}, with the other switches as they were given;
    None where there is no batch, or no repeated block to checkpoint. measure() adds device_peak on CUDA: the most that
    torch had allocated there since its count was last reset.
    """

    def __str__(self) -> str:
        rows = [(key, self[key]) for key in (*KEYS, "total", "device_peak") if key in self]
        rows += [(f"saved by {name}", amount) for name, amount in self.get("saves", {}).items() if amount is not None]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {_mebibytes(amount)}" for name, amount in rows)


def usage(**amounts: int | None) -> Usage:
    """Of the five keys, with their total."""
    found = {key: amounts[key] for key in KEYS}
    return Usage(found, total=sum(amount for amount in found.values() if amount is not None))


def _mebibytes(amount: int | None) -> str:
    return f"{amount / 2**20:>12,.2f} MiB" if amount is not None else f"{'unknown':>12}"
