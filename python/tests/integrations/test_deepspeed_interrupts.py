"""A swap of averages that ZeRO's ranks divide, of which one rank is interrupted anywhere: low-precision weights of
ranks that own parts of their masters, and partitions of which gathered copies are about."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import engine, of_deepspeed, train
from stopped_swaps import TIMEOUT, Rank
from swap_seams import run_in_new_processes

from shardow.integrations.deepspeed import ema

pytestmark = of_deepspeed
EVERY = bool(os.environ.get("SHARDOW_ALL"))


class OfEngine(Rank):
    """Between the points it trains, and what it computes before and after one is the same."""

    def __init__(self, kind: str, folder: str) -> None:
        self._made, self._count = engine(kind), 0
        super().__init__(ema(self._made, 0.5, timeout=TIMEOUT), self._made.module, folder)

    def step(self) -> None:
        train(self._made, self._count)
        self._ema.update()
        self._count += 1
        self._computed = self._compute()

    @staticmethod
    def local(tensor: torch.Tensor) -> torch.Tensor:
        if not hasattr(tensor, "ds_tensor"):
            return tensor
        part = tensor.ds_tensor  # ZeRO-3's partition ends with padding that DeepSpeed never sets: NaN by chance
        return part.flatten()[: max(0, tensor.ds_numel - dist.get_rank() * part.numel())]  # type: ignore[attr-defined]

    def _compute(self) -> torch.Tensor:
        self._made.eval()
        with torch.no_grad():
            found = self._made(torch.linspace(-1, 1, 21).view(3, 7).to(self._made.get_data_types()[0])).clone()
        self._made.train()
        return found

    def go_on_after(self, way: Any, by: Any, stop: Any, victim: int) -> bool | None:
        missed = super().go_on_after(way, by, stop, victim)
        self.expect(stop, torch.equal(self._compute(), self._computed), "computes with other weights")
        return missed


def stopped(kind: str, folder: str) -> list[Any]:
    rank = OfEngine(kind, folder)
    return [rank.wrong, rank.go_through_all()]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "kind", ["zero1", "zero2", "bf16-optimizer", "zero3", "zero3-bf16"] if EVERY else ["zero3-bf16"]
)
def test_stopped_anywhere_on_one_rank_the_weights_come_back_on_both_and_all_goes_on(
    kind: str, quick_folder: Path
) -> None:
    (wrong0, points), (wrong1, _) = run_in_new_processes(
        2, stopped, kind, str(quick_folder), timeout=3000 if EVERY else 280
    )
    assert wrong0 + wrong1 == []
    assert min(points) > 2, points
    assert not EVERY or points[0] > 300, points
