"""EMA(device="cpu") of weights on a CUDA device, one that is late: the averages of weights whose averages live beside them."""

from __future__ import annotations

from pathlib import Path

import fake_device
import pytest
import torch
import trainings


@pytest.mark.parametrize(("how", "seed", "ring_bytes"), [("offloaded", 1, trainings.SMALLEST_RING), ("offloaded by hand", 2, 1 << 20)])
@pytest.mark.parametrize(("kind", "world", "dtype"), trainings.SOME, ids=str)
def test_no_rule_dtype_or_decay_shows_how_averages_are_kept(
    kind: str, world: int, dtype: torch.dtype, how: str, seed: int, ring_bytes: int, tmp_path: Path
) -> None:
    (resident, _), *_ = fake_device.run(world, trainings.everything, kind, dtype, "resident", str(tmp_path))
    found = fake_device.run(world, trainings.everything, kind, dtype, how, str(tmp_path), seed, ring_bytes)
    trainings.same(resident, found[0][0])
    for _, stats in found:  # what crosses the link: each weight once, in its own dtype
        crossed = {name: one["offload/bytes"] for name, one in stats.items() if name not in trainings.IN_BETWEEN}
        copies = {name: chosen.get("start_step", 0) for name, chosen in trainings.options().items()}  # of weights, before any update
        assert crossed == {name: (copies[name] + stats[name]["updates"]) * stats[name]["elements"] * dtype.itemsize for name in crossed}
